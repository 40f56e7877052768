"""Tables and figure of REPORT.md."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from bench.report import LINES
from bench.report.rows import FOLDER, read
from bench.tables import markdown_table, thousands

LENGTHS = (16384, 32768, 65536, 131072)
DENSITIES = (0.05, 0.1, 0.2, 0.3, 0.5)
DENSE = "dense (SDPA, cuDNN)"


def rows_of(part: str, what: str, measure: str, folder: Path = FOLDER) -> pd.DataFrame:
    """Rows of the structured workload on the device with the most rows; `share` is `value` over the fastest dense kernel's."""
    rows = read("speed", folder)
    rows = rows[(rows["device"] == rows["device"].mode()[0]) & (rows["input"] == "structured")]
    rows = rows[rows["part"].isin(part.split(",")) & (rows["measure"] == measure) & (rows["what"] == what)]
    value = rows["value"].astype(float)
    return rows.assign(value=value, share=value / rows["fastest_value"].astype(float))


def call_rows(folder: Path = FOLDER, backend: str = "flash", torch: str | None = None) -> pd.DataFrame:
    """Plain calls in blocks of 128 with the time of the fastest dense kernel, on `torch`; None: last used at their length."""
    rows = rows_of("latency,equal error", "call", "eager_ms", folder)
    rows = rows[(rows["backend"] == backend) & rows["share"].notna() & ~rows["options"].str.contains("block_size")]
    # since 2.14.1 hybrid's default setting, without a wanted density, has a floor, which the others lack
    has_floor = (rows["method"] == "hybrid") & rows["wanted"].isna() & ~rows["torch"].str.startswith("2.11")
    rows = rows[~has_floor].sort_values("date", kind="stable")
    last_used = rows.groupby(["method", "tokens"])["torch"].transform("last")
    return rows[rows["torch"] == (last_used if torch is None else torch)]


def speed_up(rows: pd.DataFrame, density: float) -> float:
    """Fastest dense kernel's time over a call's at a density, the call's interpolated linearly; NaN out of range.

    `rows` are calls of one method at one length.
    """
    by = rows.groupby(rows["density"].round(4))["share"].last()
    if len(by) < 2 or not by.index[0] - 0.01 <= density <= by.index[-1] + 0.01:
        return float("nan")
    return 1 / float(np.interp(density, by.index, by))


def times(value: float, digits: int = 1) -> str:
    """A ratio as ``4.3x``; a dash for NaN."""
    return "-" if np.isnan(value) else f"{value:.{digits}f}x"


def milliseconds(value: float) -> str:
    """Three digits."""
    return f"{value:,.3g}" if value < 1000 else f"{value:,.0f}"


def _by_length(rows: pd.DataFrame) -> list[tuple[int, pd.DataFrame]]:
    """Of call rows hybrid's, by length."""
    return [(tokens, rows[(rows["tokens"] == tokens) & (rows["method"] == "hybrid")]) for tokens in LENGTHS]


def calls(folder: Path = FOLDER, backend: str = "flash") -> list[str]:
    """Speed-up of hybrid's calls at fixed densities."""
    cells = []
    for tokens, own in _by_length(call_rows(folder, backend)):
        figures = [times(speed_up(own, density)) for density in DENSITIES]
        cells.append([thousands(tokens), *figures, own["date"].max()])
    return markdown_table(["tokens", *(f"{each:.0%}" for each in DENSITIES), "measured"], cells)


def dense(folder: Path = FOLDER) -> list[str]:
    """Milliseconds of the dense kernels by length."""
    table = rows_of("latency", "dense", "eager_ms", folder).pivot_table("value", "backend", "tokens", aggfunc="last")
    cells = [[str(name), *("-" if pd.isna(value) else milliseconds(value) for value in row)] for name, row in table.iterrows()]
    return markdown_table(["dense kernel, ms", *map(thousands, table.columns)], cells)


def model_rows(folder: Path = FOLDER) -> pd.DataFrame:
    """Prefills of whole models of 8B shapes on one GPU, by model and length."""
    rows = pd.read_json(folder / "models-nvidia-h200.jsonl", lines=True)
    return rows[rows["model"].isin(("llama-3.1-8b", "qwen3-8b")) & (rows["layers"] > 8)].set_index(["model", "prompt_tokens"])


def models(folder: Path = FOLDER) -> list[str]:
    """Seconds of a dense prefill and speed-ups over random blocks, with attention's seconds in brackets."""
    rows, cells = model_rows(folder), []
    for model, tokens in rows.index.unique():
        by = rows.loc[[(model, tokens)]].set_index("method")
        base, attention = by["seconds"][DENSE], by["attention_ms"] / 1e3
        sparse = [f"random blocks, {density}" for density in DENSITIES[1:4]]
        figures = [f"{times(base / by['seconds'][name], 2)} ({attention[name]:.2f} s)" for name in sparse]
        cells.append(
            [f"{model}, {by['layers'].iloc[0]} layers", thousands(tokens), f"{base:.2f} s ({attention[DENSE]:.2f} s)", *figures]
        )
    return markdown_table(["shape", "tokens", "dense", *(f"{density:.0%} of the blocks" for density in DENSITIES[1:4])], cells)


def draw_calls(axes: Any, folder: Path = FOLDER) -> None:
    for (tokens, own), (colour, marker, dash) in zip(_by_length(call_rows(folder)), LINES, strict=False):
        own = own.sort_values("density").drop_duplicates("density", keep="last")
        style: dict[str, Any] = {"color": colour, "marker": marker, "linestyle": dash, "markersize": 5}
        axes.plot(100 * own["density"], 1 / own["share"], label=f"{thousands(tokens)} tokens, hybrid", **style)
    axes.axhline(1, color="#444444", linewidth=0.8)
    axes.set(xlabel="density, %", ylabel="speed-up over the fastest dense kernel", yscale="log")
    axes.set_yticks([1, 2, 5, 10, 20], ["1", "2", "5", "10", "20"])
    axes.minorticks_off()
    axes.legend(frameon=False, fontsize=9)


TABLES: dict[str, Callable[[Path], list[str]]] = {
    "dense": dense,
    "calls": calls,
    "calls-triton": partial(calls, backend="triton"),
    "whole-models": models,
}
