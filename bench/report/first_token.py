"""Time to first token of 8B shapes in engines and in transformers: README's table and figure."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd

from bench.report import LINES
from bench.report.fidelity import LENGTHS, hybrid_at, language_model
from bench.report.rows import FOLDER, number, percent
from bench.report.speed import DENSE, model_rows, times
from bench.serving.table import Row, engine_rows, first_tokens, throughput
from bench.tables import markdown_table, thousands

SHAPE = "llama-3.1-8b"
_SHOWN = (32768, 65536, 131072)
RANDOM = 0.2  # density of the random blocks that transformers was timed with
_H100 = {"device": "NVIDIA H100 80GB HBM3", "vllm": "0.26.0", "model": SHAPE, "run": "nearest keys"}
# pages, from README.md
_ENGINES, _MODELS = "docs/serving.md#measurements", "bench/REPORT.md#whole-models"
_VLLM = "bench/REPORT.md#vllm-on-an-h100"
_ERROR = "bench/FIDELITY.md#does-it-hold-at-my-length"


def vllm(folder: Path = FOLDER, model: str = SHAPE, cache: str = "auto") -> pd.DataFrame:
    """On an H200: seconds `dense` and `sparse`, their `ratio`, and `density`, by prompt tokens; so are the others."""
    rows = pd.read_csv(folder / "step-nvidia-h200.csv")
    rows = rows[(rows["kind"] == "ttft") & (rows["model"] == model) & (rows["kv_cache"] == cache)]
    return _paired(rows.assign(seconds=rows["milliseconds"] / 1e3), "attention", "stock", "hybrid")


def _vllm_rows(folder: Path, figure: str, **wanted: Any) -> list[Row]:
    """Rows of `bench.serving.first_token` that have a figure, under some conditions."""
    rows = engine_rows(folder)
    return [row for row in rows if figure in row and all(row.get(name) == value for name, value in wanted.items())]


def vllm_prefills(folder: Path, sparse: str, **wanted: Any) -> pd.DataFrame:
    """Whole prompts in vLLM by `bench.serving.first_token`, under some conditions; `sparse` names the method."""
    return _paired(pd.DataFrame(_vllm_rows(folder, "first_seconds", chunk=None, **wanted)), "method", "stock", sparse)


def vllm_h100(folder: Path = FOLDER) -> pd.DataFrame:
    """Whole prompts, hybrid with the nearest keys, on an H100."""
    rows = pd.DataFrame(_vllm_rows(folder, "first_seconds", chunk=None, **_H100))
    return _paired(rows.assign(attention=rows["method"].str.split(",").str[0]), "attention", "stock", "hybrid")


def vllm_first_tokens(folder: Path = FOLDER) -> list[str]:
    return first_tokens(_vllm_rows(folder, "first_seconds", **_H100))


def vllm_at_once(folder: Path = FOLDER) -> list[str]:
    return throughput(_vllm_rows(folder, "tokens_per_second", **_H100))


def sglang(folder: Path = FOLDER, gpu: str = "h200", kernel: str = "fa3") -> pd.DataFrame:
    rows = pd.read_csv(folder / f"sglang-nvidia-{gpu}.csv")
    alone = (rows["prompts"] == 1) & (rows["new_tokens"] == 1) & (rows["kernel"] == kernel)
    return _paired(rows[alone], "attention", "stock", "hybrid")


def transformers(folder: Path = FOLDER, model: str = SHAPE) -> pd.DataFrame:
    """Of random blocks."""
    rows = model_rows(folder).loc[model].reset_index()
    return _paired(rows, "method", DENSE, f"random blocks, {RANDOM}").assign(density=RANDOM)


def _paired(rows: pd.DataFrame, by: str, dense: str, sparse: str) -> pd.DataFrame:
    """Mean figures of two ways by prompt tokens, where both were timed."""
    own = {name: rows[rows[by] == way].groupby("prompt_tokens") for name, way in (("dense", dense), ("sparse", sparse))}
    paired = pd.DataFrame({name: each["seconds"].mean() for name, each in own.items()}).dropna()
    return paired.assign(ratio=paired["dense"] / paired["sparse"], density=own["sparse"]["density"].mean())


def _cell(own: pd.Series, page: str, digits: int = 1) -> str:
    """Seconds and their ratio, with the density in brackets."""
    density = percent(own["density"], digits)
    return f"{own['dense']:.3f} to {own['sparse']:.3f} s, [{times(own['ratio'], 2)}]({page}) ({density})"


def table(folder: Path = FOLDER) -> list[str]:
    """A row per length; the error is hybrid's on texts of that length."""
    in_vllm, in_sglang, in_transformers = vllm_h100(folder), sglang(folder), transformers(folder)
    cells = []
    for tokens in _SHOWN:
        yarn = 8 if tokens in LENGTHS else 16
        kept, change = hybrid_at(language_model(tokens, folder, yarn))[["density", "abs_d"]].mean()
        error = f"[{number(change)}]({_ERROR}) ({percent(kept)}{'' if yarn == 8 else '; factor 16'})"
        engines = [_cell(in_vllm.loc[tokens], _VLLM), _cell(in_sglang.loc[tokens], _ENGINES)]
        cells.append([thousands(tokens), *engines, _cell(in_transformers.loc[tokens], _MODELS, digits=0), error])
    engines = ["vLLM 0.26, H100 (density)", "SGLang 0.5.16, H200", "transformers 5.17, H200, random blocks"]
    return markdown_table(["prompt", *engines, "error*, SmolLM2-135M"], cells)


def draw(axes: Any, folder: Path = FOLDER) -> None:
    """Ratios by length, a line per engine; a line ends where a length was not timed."""
    engines = {
        "vLLM 0.26, H100, density of text": vllm_h100(folder),
        "vLLM 0.26, H200, density of text": vllm(folder),
        "SGLang 0.5.16, H200, density of text": sglang(folder),
        f"transformers, H200, random blocks, density {RANDOM:.0%}": transformers(folder),
    }
    lengths = sorted({int(tokens) for figures in engines.values() for tokens in figures.index})
    for (name, figures), (colour, marker, dash) in zip(engines.items(), LINES, strict=False):
        style: dict[str, Any] = {"color": colour, "marker": marker, "linestyle": dash, "markersize": 6, "fillstyle": "none"}
        axes.plot(lengths, figures["ratio"].reindex(lengths), label=name, **style)
    axes.axhline(1, color="#444444", linewidth=0.8)
    axes.set(xlabel="tokens of the prompt", ylabel="first token: times as fast as dense", xscale="log", ylim=(0.9, 2.8))
    axes.set_xticks(lengths, [thousands(tokens) for tokens in lengths])
    axes.minorticks_off()
    axes.grid(color="#dddddd", linewidth=0.6)
    axes.legend(frameon=False, fontsize=9, loc="upper left")


TABLES = {
    "first-token": table,
    "vllm-first-tokens": vllm_first_tokens,
    "vllm-at-once": vllm_at_once,
}
