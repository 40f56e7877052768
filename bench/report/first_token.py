"""Time to first token in engines and in transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd

from bench.report.rows import FOLDER
from bench.report.speed import DENSE, model_rows
from bench.serving.table import Row, engine_rows, first_tokens, loads, throughput

SHAPE = "llama-3.1-8b"
RANDOM = 0.2  # density of the random blocks that transformers was timed with
IN_CHUNKS = "nearest keys, chunks"  # a run
_H100 = {"device": "NVIDIA H100 80GB HBM3", "vllm": "0.26.0", "model": SHAPE, "run": "nearest keys"}


def vllm(folder: Path = FOLDER, model: str = SHAPE, cache: str = "auto") -> pd.DataFrame:
    """On an H200: seconds `dense` and `sparse`, their `ratio`, and `density`, by prompt tokens; so are the others."""
    rows = pd.read_csv(folder / "step-nvidia-h200.csv")
    rows = rows[(rows["kind"] == "ttft") & (rows["model"] == model) & (rows["kv_cache"] == cache)]
    return _paired(rows.assign(seconds=rows["milliseconds"] / 1e3), "attention", "stock", "hybrid")


def vllm_rows(folder: Path, figure: str, **wanted: Any) -> list[Row]:
    """Rows of `bench.serving.first_token` that have a figure, under some conditions."""
    rows = engine_rows(folder)
    return [row for row in rows if figure in row and all(row.get(name) == value for name, value in wanted.items())]


def vllm_prefills(folder: Path, sparse: str, **wanted: Any) -> pd.DataFrame:
    """Prompts in vLLM by `bench.serving.first_token`, whole unless `wanted` has a chunk; `sparse` names the method."""
    rows = vllm_rows(folder, "first_seconds", **{"chunk": None, **wanted})
    return _paired(pd.DataFrame(rows), "method", "stock", sparse)


def vllm_engines_in_turns(folder: Path, model: str, chunk: int | None) -> pd.DataFrame:
    """Times of vLLM 0.33 on an H200: stock and hybrid engines on one GPU that answered in turns."""
    found = vllm_rows(folder, "first_seconds", chunk=chunk, model=model, vllm="0.33.0", device="NVIDIA H200")
    rows = pd.DataFrame([row for row in found if row["run"].endswith(", in turns")])
    return _paired(rows.assign(attention=rows["method"].str.split(",").str[0]), "attention", "stock", "hybrid")


def sglang(folder: Path = FOLDER, gpu: str = "h200", kernel: str = "fa3", model: str = SHAPE) -> pd.DataFrame:
    rows = pd.read_csv(folder / f"sglang-nvidia-{gpu}.csv")
    alone = (rows["prompts"] == 1) & (rows["new_tokens"] == 1) & (rows["kernel"] == kernel) & (rows["model"] == model)
    return _paired(rows[alone], "attention", "stock", "hybrid")


def transformers(folder: Path = FOLDER, model: str = SHAPE) -> pd.DataFrame:
    """Times in transformers, of random blocks."""
    rows = model_rows(folder).loc[model].reset_index()
    return _paired(rows, "method", DENSE, f"random blocks, {RANDOM}").assign(density=RANDOM)


def _paired(rows: pd.DataFrame, by: str, dense: str, sparse: str) -> pd.DataFrame:
    """Mean figures of two ways by prompt tokens, where both were timed."""
    own = {name: rows[rows[by] == way].groupby("prompt_tokens") for name, way in (("dense", dense), ("sparse", sparse))}
    paired = pd.DataFrame({name: each["seconds"].mean() for name, each in own.items()}).dropna()
    return paired.assign(ratio=paired["dense"] / paired["sparse"], density=own["sparse"]["density"].mean())


TABLES = {
    "vllm-first-tokens": lambda folder: first_tokens(vllm_rows(folder, "first_seconds", **_H100)),
    "vllm-chunks": lambda folder: first_tokens(vllm_rows(folder, "first_seconds", **{**_H100, "run": IN_CHUNKS})),
    "vllm-load": lambda folder: loads(vllm_rows(folder, "rate", **{**_H100, "run": "nearest keys, under load"})),
    "vllm-under-load": lambda folder: loads(
        vllm_rows(folder, "rate", device="NVIDIA H200", vllm="0.33.0", run="nearest keys, under load")
    ),
    "vllm-at-once": lambda folder: throughput(vllm_rows(folder, "tokens_per_second", **_H100)),
}
