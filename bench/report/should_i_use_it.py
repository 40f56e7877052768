"""Tables of docs/should-i-use-it.md: what runs sparse, and the gain."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from bench.report.first_token import SHAPE, sglang, transformers, vllm, vllm_prefills
from bench.report.first_token import vllm_engines_in_turns as in_turns
from bench.report.rows import FOLDER
from bench.report.speed import times
from bench.report.trained import NAME
from bench.tables import markdown_table, thousands

# pages, from docs/
_ENGINES = "serving-measurements.md#times-of-sglang"
_MODELS = "../bench/REPORT.md#whole-models"
_NEWEST = "serving.md#times"
_MIXTURES = "serving-measurements.md#mixtures-and-sinks"
_SERVED = "serving.md#which-layers-run-sparse"
_OLDER = "../bench/archive/engines.md#times"
_LATENT = "serving-measurements.md#deepseek-v3s-attention"
_ON_FLASH = "hybrid, gamma 0.1, min_budget 2688, backend flash"
_GAINS = (16384, 32768, 65536, 131072)  # prompt tokens


def _gains(figures: pd.DataFrame, page: str, note: str = "") -> list[str]:
    """Ratios to dense at each of `_GAINS`, each a link."""
    ratios = figures["ratio"]
    return [f"[{times(ratios[tokens], 2)}]({page}){note}" if tokens in ratios else "-" for tokens in _GAINS]


def models(folder: Path = FOLDER) -> list[str]:
    """Gains by model family and engine."""
    latent = vllm_prefills(folder, _ON_FLASH, model="deepseek-v3-dense", vllm="0.33.0")
    mixture = vllm_prefills(folder, "random_blocks, density 0.1", model="qwen3-next-dense", vllm="0.33.0")
    sinks = vllm_prefills(folder, "random_blocks, density 0.17", model="gpt-oss-4-experts", vllm="0.33.0")
    served, in_transformers = f"[all layers]({_SERVED})", "[all layers](../integrations/README.md#what-is-served)"
    attention_layers = f"[attention layers]({_SERVED})"
    windows = f"[layers without a window, or with one of 16,384 tokens or more]({_SERVED})"
    as_its_row = "[as its row says](../integrations/huggingface/SUPPORT.md)"
    none = ["-"] * len(_GAINS)
    rows = [
        ["Qwen2.5-Coder-1.5B, trained, on text", "vLLM 0.33", *_gains(in_turns(folder, NAME, None), _NEWEST), served],
        ["the same, chunks of 8k", "vLLM 0.33", *_gains(in_turns(folder, NAME, 8192), _NEWEST), served],
        ["the same, its default chunks", "SGLang 0.5.23, H200", *_gains(sglang(folder, model=NAME), _ENGINES), served],
        ["Llama 3.1 8B", "vLLM 0.33", *_gains(in_turns(folder, SHAPE, None), _NEWEST), served],
        ["the same, chunks of 8k", "vLLM 0.33", *_gains(in_turns(folder, SHAPE, 8192), _NEWEST), served],
        ["the same, whole", "vLLM 0.26", *_gains(vllm(folder).loc[[16384]], _OLDER), served],
        ["the same, FP8 cache", "vLLM 0.26", *_gains(vllm(folder, SHAPE, "fp8"), _OLDER), served],
        ["the same, its default chunks", "SGLang 0.5.23, H200", *_gains(sglang(folder), _ENGINES), served],
        ["the same", "SGLang 0.5.23, H100", *_gains(sglang(folder, "h100"), _ENGINES), served],
        ["the same, FP8 cache", "SGLang 0.5.23, H100", *_gains(sglang(folder, "h100", "fa3, FP8 cache"), _ENGINES), served],
        ["the same", "transformers, random blocks", *_gains(transformers(folder), _MODELS), in_transformers],
        ["Qwen3 8B", "transformers, random blocks", *_gains(transformers(folder, "qwen3-8b"), _MODELS), in_transformers],
        ["DeepSeek V3's attention, 51.7% of the blocks", "vLLM 0.33, H100", *_gains(latent, _LATENT), served],
        ["Qwen3-Next", "vLLM 0.33, H100, random blocks", *_gains(mixture, _MIXTURES), attention_layers],
        ["gpt-oss-20b", "vLLM 0.33, H100, random blocks", *_gains(sinks, _MIXTURES), windows],
        ["Gemma, other windows", "transformers, vLLM", *none, windows],
        ["any other of transformers", "transformers", *none, as_its_row],
    ]
    return markdown_table(["shape", "engine", *map(thousands, _GAINS), "runs sparse"], rows)


TABLES = {"use-models": models}
