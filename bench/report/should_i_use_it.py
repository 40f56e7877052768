"""Tables of docs/should-i-use-it.md: what runs sparse, the gain, the error and what nobody measured."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from bench.report.fidelity import LENGTHS, hybrid_at, language_model
from bench.report.rows import ERROR, FOLDER, number, percent
from bench.report.speed import DENSE, call_rows, model_rows, speed_up, times
from bench.tables import markdown_table, thousands

# pages, from docs/
_ENGINES, _ERROR = "serving.md#measurements", "../bench/FIDELITY.md#does-it-hold-at-my-length"
_CALLS, _MODELS = "../bench/REPORT.md#whole-calls", "../bench/REPORT.md#whole-models"
_SERVED, _NEEDLES = "serving.md#what-runs-sparse-and-what-was-run-where", "../bench/FIDELITY.md#does-it-still-find-needles"


def _gains(seconds: pd.DataFrame, dense: str, sparse: str, page: str) -> str:
    """How many times as fast by length, each a link, from a row of times per length."""
    ratios = (seconds[dense] / seconds[sparse]).dropna()
    return ", ".join(f"[{times(ratio)} at {thousands(tokens)}]({page})" for tokens, ratio in ratios.items())


def _vllm(folder: Path, model: str, cache: str = "auto") -> str:
    rows = pd.read_csv(folder / "step-nvidia-h200.csv")
    rows = rows[(rows["kind"] == "ttft") & (rows["model"] == model) & (rows["kv_cache"] == cache)]
    return _gains(rows.pivot_table("milliseconds", "prompt_tokens", "attention"), "stock", "hybrid", _ENGINES)


def _sglang(folder: Path) -> str:
    rows = pd.read_csv(folder / "sglang-nvidia-h200.csv")
    rows = rows[(rows["prompts"] == 1) & (rows["new_tokens"] == 1)]
    return _gains(rows.pivot_table("seconds", "prompt_tokens", "attention"), "stock", "hybrid", _ENGINES)


def _transformers(folder: Path, model: str) -> str:
    rows = model_rows(folder).loc[model]
    return _gains(rows.pivot_table("seconds", "prompt_tokens", "method"), DENSE, "random blocks, 0.2", _MODELS)


def models(folder: Path = FOLDER) -> list[str]:
    """By model family and engine."""
    changes = [hybrid_at(language_model(length, folder))["abs_d"].mean() for length in LENGTHS]
    error = f"[{ERROR} {number(min(changes))} to {number(max(changes))}]({_ERROR})"
    needles = f"[needles and RULER's types with small models]({_NEEDLES})"
    served, in_transformers = f"[all layers]({_SERVED})", "[all layers](../integrations/README.md#what-is-served)"
    windows = f"[layers without a window, or with one of 16,384 tokens or more]({_SERVED})"
    as_its_row, yours = "[as its row says](../integrations/huggingface/SUPPORT.md)", "[yours](command-line.md#flexmask-gain)"
    shape, blocks, trained = "random weights: speed only", "random blocks: speed only", "trained weights"
    llama, fp8 = _vllm(folder, "llama-3.1-8b"), _vllm(folder, "llama-3.1-8b", "fp8")
    rows = [
        ["Llama 3.1 8B (shape)", "vLLM 0.26", served, llama, shape, trained],
        ["the same, FP8 cache", "vLLM 0.26", served, fp8, shape, f"{trained}, longer prompts"],
        ["the same", "SGLang 0.5.16", served, _sglang(folder), shape, trained],
        ["the same", "transformers", in_transformers, _transformers(folder, "llama-3.1-8b"), blocks, trained],
        ["Qwen3 8B (shape)", "transformers", in_transformers, _transformers(folder, "qwen3-8b"), blocks, f"{trained}, engines"],
        ["DeepSeek V3's attention", "vLLM 0.26", served, _vllm(folder, "deepseek-v3-dense"), shape, f"{trained}, experts"],
        ["SmolLM2-135M (trained)", "transformers", in_transformers, "not timed whole", f"{error}; {needles}", "larger models"],
        ["Gemma, gpt-oss, windows", "transformers, vLLM", windows, f"not measured: {yours}", "not measured", "gain and error"],
        ["any other of transformers", "transformers", as_its_row, f"not measured: {yours}", "not measured", "gain and error"],
    ]
    head = "model, engine, runs sparse, gain of the first token (one H200), error, nobody measured"
    return markdown_table(head.split(", "), rows)


def lengths(folder: Path = FOLDER) -> list[str]:
    """By length of the prompt: attention alone, and the error on texts."""
    calls, rows = call_rows(folder), []
    for length in LENGTHS:
        kept, error = hybrid_at(language_model(length, folder))[["density", "abs_d"]].mean()
        gain = speed_up(calls[(calls["tokens"] == length) & (calls["method"] == "hybrid")], kept)
        shown = "not timed at this share" if pd.isna(gain) else f"[{times(gain)}]({_CALLS})"
        rows.append([thousands(length), percent(kept), shown, f"[{number(error)}]({_ERROR})"])
    return markdown_table(["prompt", "blocks kept, SmolLM2", "attention alone, one H200", f"error ({ERROR}), SmolLM2"], rows)


TABLES = {"use-models": models, "use-lengths": lengths}
