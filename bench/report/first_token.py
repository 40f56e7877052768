"""Time to first token of 8B shapes in engines and in transformers: README's table and figure."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd

from bench.report.fidelity import LENGTHS, hybrid_at, language_model
from bench.report.rows import FOLDER, number, percent
from bench.report.speed import DENSE, model_rows, times
from bench.tables import markdown_table, thousands
from flexmask.plot.charts import LINES

SHAPE = "llama-3.1-8b"
_SHOWN = (32768, 131072)
RANDOM = 0.2  # density of the random blocks that transformers was timed with
# pages, from README.md
_ENGINES, _MODELS = "docs/serving.md#measurements", "bench/REPORT.md#whole-models"
_ERROR = "bench/FIDELITY.md#does-it-hold-at-my-length"


def vllm(folder: Path = FOLDER, model: str = SHAPE, cache: str = "auto") -> pd.DataFrame:
    """Seconds `dense` and `sparse`, their `ratio`, and `density`, by prompt tokens; so are the other two."""
    rows = pd.read_csv(folder / "step-nvidia-h200.csv")
    rows = rows[(rows["kind"] == "ttft") & (rows["model"] == model) & (rows["kv_cache"] == cache)]
    return _paired(rows.assign(seconds=rows["milliseconds"] / 1e3), "attention", "stock", "hybrid")


def sglang(folder: Path = FOLDER) -> pd.DataFrame:
    rows = pd.read_csv(folder / "sglang-nvidia-h200.csv")
    return _paired(rows[(rows["prompts"] == 1) & (rows["new_tokens"] == 1)], "attention", "stock", "hybrid")


def transformers(folder: Path = FOLDER, model: str = SHAPE) -> pd.DataFrame:
    """Of random blocks."""
    rows = model_rows(folder).loc[model].reset_index()
    return _paired(rows, "method", DENSE, f"random blocks, {RANDOM}").assign(density=RANDOM)


def _paired(rows: pd.DataFrame, by: str, dense: str, sparse: str) -> pd.DataFrame:
    """Mean figures of two ways by prompt tokens, where both were timed."""
    own = {name: rows[rows[by] == way].groupby("prompt_tokens") for name, way in (("dense", dense), ("sparse", sparse))}
    paired = pd.DataFrame({name: each["seconds"].mean() for name, each in own.items()}).dropna()
    return paired.assign(ratio=paired["dense"] / paired["sparse"], density=own["sparse"]["density"].mean())


def table(folder: Path = FOLDER) -> list[str]:
    """By length and engine; the error is hybrid's on texts of that length or of the longest that was read."""
    random = transformers(folder)
    engines = (
        ("vLLM 0.26", vllm(folder), 1, _ENGINES),
        ("SGLang 0.5.16", sglang(folder), 1, _ENGINES),
        ("transformers 5.17, random blocks", random, 0, _MODELS),
    )
    cells = []
    for tokens in _SHOWN:
        read = max(length for length in LENGTHS if length <= tokens)
        kept, error = hybrid_at(language_model(read, folder))[["density", "abs_d"]].mean()
        lost = f"[{number(error)} ({percent(kept)})]({_ERROR})"
        if read != tokens:
            lost = f"not measured; at {thousands(read)} {lost}"
        for engine, figures, digits, page in engines:
            own = figures.loc[tokens]
            seconds = [f"{own[name]:.3f} s" for name in ("dense", "sparse")]
            cells.append(
                [
                    thousands(tokens),
                    engine,
                    *seconds,
                    f"[{times(own['ratio'], 2)}]({page})",
                    percent(own["density"], digits),
                    "-" if figures is random else lost,
                ]
            )
    return markdown_table(
        ["prompt", "engine", "dense", "flexmask", "speed-up", "density", "SmolLM2's error on text, gamma 0.9 (density)"], cells
    )


def draw(axes: Any, folder: Path = FOLDER) -> None:
    """Ratios by length, a line per engine."""
    engines = {
        "vLLM 0.26, density of text": vllm(folder),
        "SGLang 0.5.16, density of text": sglang(folder),
        f"transformers, random blocks, density {RANDOM:.0%}": transformers(folder),
    }
    for (name, figures), (colour, marker, dash) in zip(engines.items(), LINES, strict=False):
        style: dict[str, Any] = {"color": colour, "marker": marker, "linestyle": dash, "markersize": 5}
        axes.plot(figures.index, figures["ratio"], label=name, **style)
    axes.axhline(1, color="#444444", linewidth=0.8)
    axes.set(xlabel="tokens of the prompt", ylabel="first token: times as fast as dense", xscale="log", ylim=(0.9, 2.8))
    lengths = sorted({int(tokens) for figures in engines.values() for tokens in figures.index})
    axes.set_xticks(lengths, [thousands(tokens) for tokens in lengths])
    axes.minorticks_off()
    axes.grid(color="#dddddd", linewidth=0.6)
    axes.legend(frameon=False, fontsize=9, loc="upper left")


TABLES = {"first-token": table}
