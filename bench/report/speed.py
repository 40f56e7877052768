"""Tables and figure of REPORT.md."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from bench.report.rows import FOLDER, percent, read
from bench.tables import markdown_table, thousands
from flexmask.pictures.style import LINES

LENGTHS = (16384, 32768, 65536, 131072)
DENSITIES = (0.05, 0.1, 0.2, 0.3, 0.5)
OURS = ("hybrid", "flexprefill")
KERNELS = ("flash", "cpu")  # FlexAttention's backends that the tables compare


def rows_of(part: str, what: str, measure: str, folder: Path = FOLDER) -> pd.DataFrame:
    """Rows of the structured workload on the device with the most rows; `share` is `value` over the fastest dense kernel's."""
    rows = read("speed", folder)
    rows = rows[rows["device"] == rows["device"].mode()[0]]
    chosen = (
        rows["part"].isin(part.split(","))
        & (rows["measure"] == measure)
        & (rows["input"] == "structured")
        & rows["what"].isin(what.split(","))
    )
    rows = rows[chosen].assign(value=rows["value"][chosen].astype(float))
    return rows.assign(share=rows["value"] / rows["fastest_value"].astype(float))


def call_rows(folder: Path = FOLDER, backends: tuple[str, ...] = KERNELS) -> pd.DataFrame:
    """Plain calls with blocks of the usual size, with the time of the fastest dense kernel."""
    rows = rows_of("latency,equal error", "call", "eager_ms", folder)
    usual = ~rows["options"].str.contains("block_size")
    return rows[rows["backend"].isin(backends) & rows["share"].notna() & usual]


def speed_up(rows: pd.DataFrame, density: float) -> float:
    """Fastest dense kernel's time over a call's at a density, the call's interpolated linearly; NaN out of range.

    `rows` are calls of one method at one length.
    """
    by = rows.groupby(rows["density"].round(4))["share"].last()
    if len(by) < 2 or not by.index[0] - 0.01 <= density <= by.index[-1] + 0.01:
        return float("nan")
    return 1 / float(np.interp(density, by.index, by))


def times(value: float) -> str:
    """A ratio as ``4.3x``; a dash for NaN."""
    return "-" if np.isnan(value) else f"{value:.1f}x"


def milliseconds(value: float) -> str:
    """Three digits."""
    return f"{value:,.3g}" if value < 1000 else f"{value:,.0f}"


def _by_tokens(rows: pd.DataFrame, by: str, head: str, form: Callable[[float], str]) -> list[str]:
    """The last value of each length, a row by a column."""
    table = rows.pivot_table(index=by, columns="tokens", values="value", aggfunc="last")
    cells = [[str(key), *("-" if pd.isna(value) else form(value) for value in row)] for key, row in table.iterrows()]
    return markdown_table([head, *map(thousands, table.columns)], cells)


def dense(folder: Path = FOLDER) -> list[str]:
    return _by_tokens(rows_of("latency", "dense", "eager_ms", folder), "backend", "dense kernel, ms", milliseconds)


def calls(folder: Path = FOLDER, backends: tuple[str, ...] = KERNELS) -> list[str]:
    """Speed-up of hybrid's calls at fixed densities."""
    cells = []
    for tokens, own in _by_length(call_rows(folder, backends)):
        figures = [times(speed_up(own, density)) for density in DENSITIES]
        cells.append([thousands(tokens), *figures, own["date"].max()])
    return markdown_table(["tokens", *(f"{each:.0%}" for each in DENSITIES), "measured"], cells)


def _by_length(rows: pd.DataFrame) -> list[tuple[int, pd.DataFrame]]:
    """Of call rows hybrid's, by length."""
    return [(tokens, rows[(rows["tokens"] == tokens) & (rows["method"] == "hybrid")]) for tokens in LENGTHS]


def masks(folder: Path = FOLDER) -> list[str]:
    """Milliseconds of the newest masks of our methods at 32k and 128k, and share of the fastest dense kernel."""
    found = []
    for measure in ("eager_ms", "graph_ms"):
        rows = rows_of("latency,equal error", "mask", measure, folder)
        rows = rows[rows["tokens"].isin((32768, 131072)) & rows["method"].isin(("hybrid", "flexprefill"))]
        found.append(rows.sort_values("date", kind="stable").groupby(["tokens", "method"]).last())
    cells = []
    for (tokens, name), row in found[0].iterrows():
        timed = [
            text for each in (row, found[1].loc[(tokens, name)]) for text in (milliseconds(each["value"]), percent(each["share"]))
        ]
        cells.append([thousands(tokens), name, percent(row["density"]), *timed])
    return markdown_table(["tokens", "mask", "blocks kept", "plain calls, ms", "of dense", "CUDA graph, ms", "of dense"], cells)


def stages(folder: Path = FOLDER) -> list[str]:
    rows = read("speed", folder)
    rows = rows[(rows["part"] == "stages") & (rows["input"] == "structured") & (rows["what"] == "call")]
    by = rows.assign(value=rows["value"].astype(float)).pivot_table(
        index=["tokens", "method"], columns="measure", values="value", aggfunc="last", sort=False
    )
    cells = [[thousands(tokens), method, *map(milliseconds, row)] for (tokens, method), row in by.iterrows()]
    return markdown_table(["tokens", "call", *(name.removesuffix(" ms") for name in by.columns)], cells)


def memory(folder: Path = FOLDER) -> list[str]:
    """MB of a call beyond query, key, value and output."""
    rows = rows_of("memory", "call", "extra_mb", folder)
    return _by_tokens(rows[rows["backend"] != "triton"], "method", "call, MB", "{:,.0f}".format)


def draw_calls(axes: Any, folder: Path = FOLDER) -> None:
    for (tokens, own), (colour, marker, dash) in zip(_by_length(call_rows(folder)), LINES, strict=False):
        own = own.sort_values("density").drop_duplicates("density", keep="last")
        style: dict[str, Any] = {"color": colour, "marker": marker, "linestyle": dash, "markersize": 5}
        axes.plot(100 * own["density"], 1 / own["share"], label=f"{thousands(tokens)} tokens, hybrid", **style)
    axes.axhline(1, color="#444444", linewidth=0.8)
    axes.set(xlabel="blocks kept, %", ylabel="speed-up over the fastest dense kernel", yscale="log")
    axes.set_yticks([1, 2, 5, 10, 20], ["1", "2", "5", "10", "20"])
    axes.minorticks_off()
    axes.legend(frameon=False, fontsize=9)


TABLES: dict[str, Callable[[Path], list[str]]] = {
    "dense": dense,
    "calls": calls,
    "calls-triton": partial(calls, backends=("triton",)),
    "masks": masks,
    "stages": stages,
    "memory": memory,
}
