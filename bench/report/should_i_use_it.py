"""Tables of docs/should-i-use-it.md: what runs sparse, the gain, the error and what nobody measured."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pandas as pd

from bench.report.fidelity import DEFAULT, LENGTHS, language_model
from bench.report.rows import ERROR, FOLDER, number, percent
from bench.report.speed import call_rows, speed_up, times
from bench.tables import markdown_table, thousands

# pages of the documents, from docs/
_VLLM = _SGLANG = "serving.md#measurements"
_SERVED, _MODELS = "serving.md#what-runs-sparse-and-what-was-run-where", "../integrations/README.md#what-is-served"
_SUPPORT, _SPEED = "../integrations/huggingface/SUPPORT.md", "../bench/REPORT.md#whole-calls"
_ERROR, _NEEDLES = "../bench/FIDELITY.md#does-it-hold-at-my-length", "../bench/FIDELITY.md#does-it-still-find-needles"
_MEASURE = "command-line.md#flexmask-gain"
_NOTHING = f"not measured: [yours]({_MEASURE})"
_SHAPE, _RANDOM = "random weights: speed only", "random blocks: speed only"


def _linked(text: str, page: str) -> str:
    return f"[{text}]({page})"


def _range(lengths: list[int], gains: list[float], page: str) -> str:
    """Gains by length, each a link."""
    return ", ".join(_linked(f"{times(gain)} at {thousands(length)}", page) for length, gain in zip(lengths, gains, strict=True))


def _vllm(folder: Path, model: str, cache: str = "auto") -> str:
    rows = pd.read_csv(folder / "step-nvidia-h200.csv")
    rows = rows[(rows["kind"] == "ttft") & (rows["model"] == model) & (rows["kv_cache"] == cache)]
    rows = rows.pivot_table("milliseconds", "prompt_tokens", "attention").dropna(subset=["stock", "hybrid"])
    return _range([int(each) for each in rows.index], list(rows["stock"] / rows["hybrid"]), _VLLM)


def _sglang(folder: Path) -> str:
    rows = pd.read_csv(folder / "sglang-nvidia-h200.csv")
    rows = rows[(rows["prompts"] == 1) & (rows["new_tokens"] == 1)].pivot_table("seconds", "prompt_tokens", "attention")
    return _range([int(each) for each in rows.index], list(rows["stock"] / rows["hybrid"]), _SGLANG)


def _transformers(folder: Path, model: str) -> str:
    """Whole prefills over random blocks, a fifth of them."""
    lines = (folder / "models-nvidia-h200.jsonl").read_text(encoding="utf-8").splitlines()
    found: dict[int, dict[str, float]] = {}
    for each in map(json.loads, lines):
        if each["model"] == model and each["processes"] == 1:
            found.setdefault(each["prompt_tokens"], {}).setdefault(each["method"], each["seconds"])
    both = {length: by for length, by in found.items() if {"dense (SDPA, cuDNN)", "random blocks, 0.2"} <= set(by)}
    gains = [by["dense (SDPA, cuDNN)"] / by["random blocks, 0.2"] for by in both.values()]
    return _range(list(both), gains, "../bench/results/README.md#json-lines")


def models(folder: Path = FOLDER) -> list[str]:
    """By model family and engine."""
    sparse = _linked("all layers", _SERVED)
    in_transformers = _linked("all layers", _MODELS)
    changes = [_default(length, folder)["abs_d"].mean() for length in LENGTHS]
    error = _linked(f"{ERROR} {number(min(changes))} to {number(max(changes))}", _ERROR)
    needles = _linked("needles and RULER's types with small models", _NEEDLES)
    windows = _linked("layers without a window, or with one of 16,384 tokens or more", _SERVED)
    as_its_row = _linked("as its row says", _SUPPORT)
    llama, qwen = (_transformers(folder, model) for model in ("llama-3.1-8b", "qwen3-8b"))
    rows = [
        ["Llama 3.1 8B (shape)", "vLLM 0.26", sparse, _vllm(folder, "llama-3.1-8b"), _SHAPE, "trained weights"],
        [
            "the same, FP8 cache",
            "vLLM 0.26",
            sparse,
            _vllm(folder, "llama-3.1-8b", "fp8"),
            _SHAPE,
            "trained weights, longer prompts",
        ],
        ["the same", "SGLang 0.5.16", sparse, _sglang(folder), _SHAPE, "trained weights"],
        ["the same", "transformers", in_transformers, llama, _RANDOM, "trained weights"],
        ["Qwen3 8B (shape)", "transformers", in_transformers, qwen, _RANDOM, "trained weights, engines"],
        ["DeepSeek V3's attention", "vLLM 0.26", sparse, _vllm(folder, "deepseek-v3-dense"), _SHAPE, "trained weights, experts"],
        ["SmolLM2-135M (trained)", "transformers", in_transformers, "not timed whole", f"{error}; {needles}", "larger models"],
        ["Gemma, gpt-oss, windows", "transformers, vLLM", windows, _NOTHING, "not measured", "gain and error"],
        ["any other of transformers", "transformers", as_its_row, _NOTHING, "not measured", "gain and error"],
    ]
    head = "model, engine, runs sparse, gain of the first token (one H200), error, nobody measured"
    return markdown_table(head.split(", "), rows)


def lengths(folder: Path = FOLDER) -> list[str]:
    """By length of the prompt: attention alone, and the error on texts."""
    calls, rows = call_rows(folder), []
    for length in LENGTHS:
        own, at_length = _default(length, folder), calls[calls["tokens"] == length]
        kept = own["density"].mean()
        gain = speed_up(at_length[at_length["method"] == "hybrid"], kept)
        shown = "not timed at this share" if pd.isna(gain) else _linked(times(gain), _SPEED)
        rows.append([thousands(length), percent(kept), shown, _linked(number(own["abs_d"].mean()), _ERROR)])
    return markdown_table(["prompt", "blocks kept, SmolLM2", "attention alone, one H200", f"error ({ERROR}), SmolLM2"], rows)


def _default(length: int, folder: Path) -> pd.DataFrame:
    """Rows of hybrid's default setting on the held-out texts."""
    rows = language_model(length, folder)
    return rows[(rows["method"] == "hybrid") & (rows["options"] == DEFAULT)]


TABLES: dict[str, Callable[[Path], list[str]]] = {"use-models": models, "use-lengths": lengths}
