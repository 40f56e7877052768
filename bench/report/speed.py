"""Tables and figure of REPORT.md."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd

from bench.report.rows import FOLDER, NAMES, read
from bench.tables import markdown_table, thousands

_AT = ["device", "tokens", "method"]


def rows_of(part: str, what: str, measure: str, folder: Path) -> pd.DataFrame:
    """Rows of the structured workload, with `value` and `share` of the fastest dense kernel as numbers."""
    rows = read("speed", folder)
    if rows.empty:
        return pd.DataFrame(columns=[*_AT, "density", "backend", "value", "share", "what", "measure"])
    chosen = (
        (rows["part"] == part)
        & (rows["measure"] == measure)
        & (rows["input"] == "structured")
        & rows["what"].isin(what.split(","))
    )
    rows = rows[chosen].assign(value=rows["value"][chosen].astype(float))
    return rows.assign(share=rows["value"] / rows["fastest_value"].astype(float))


def milliseconds(value: float) -> str:
    """Three digits."""
    return f"{value:,.3g}" if value < 1000 else f"{value:,.0f}"


def dense(folder: Path = FOLDER) -> list[str]:
    by = rows_of("latency", "dense", "eager_ms", folder).pivot_table(
        index=["device", "backend"], columns="tokens", values="value", aggfunc="last"
    )
    cells = [[*key, *("-" if pd.isna(value) else milliseconds(value) for value in row)] for key, row in by.iterrows()]
    return markdown_table(["device", "dense kernel, ms", *map(thousands, by.columns)], cells)


def calls(folder: Path = FOLDER) -> list[str]:
    """Speed-up of whole calls by density; of rows at the same density the newest."""
    rows = rows_of("latency", "call", "eager_ms", folder)
    rows = rows[rows["backend"].isin(["flash", "cpu"]) & rows["share"].notna() & rows["method"].isin(list(NAMES))]
    cells = []
    for (device, tokens, method), own in rows.groupby(_AT):
        own = own.assign(density=own["density"].round(2)).drop_duplicates("density", keep="last").sort_values("density")
        points = ", ".join(f"{1 / row.share:.1f}x at {row.density:.2f}" for row in own.itertuples())
        cells.append([device, thousands(tokens), method, points])
    return markdown_table(["device", "tokens", "whole call", "fastest dense kernel / call, at density"], cells)


def masks(folder: Path = FOLDER) -> list[str]:
    """Milliseconds of masks, and share of the fastest dense kernel; the leaderboard has the other methods."""
    rows = (rows_of("latency", "mask", measure, folder) for measure in ("eager_ms", "graph_ms"))
    plain, graph = (each[each["method"].isin(list(NAMES))].groupby(_AT).last() for each in rows)
    cells = []
    for key, row in plain.iterrows():
        device, tokens, method = key
        as_graph = graph.loc[key] if key in graph.index else None
        graph_cell = "-" if as_graph is None else f"{milliseconds(as_graph['value'])} ({as_graph['share']:.1%})"
        cells.append([device, thousands(tokens), method, f"{milliseconds(row['value'])} ({row['share']:.1%})", graph_cell])
    return markdown_table(["device", "tokens", "mask", "plain calls, ms (of dense)", "CUDA graphs, ms (of dense)"], cells)


def stages(folder: Path = FOLDER) -> list[str]:
    rows = read("speed", folder)
    rows = rows[(rows["part"] == "stages") & (rows["input"] == "structured")] if len(rows) else rows
    if rows.empty:
        return []
    by = rows.assign(value=rows["value"].astype(float)).pivot_table(
        index=["tokens", "what", "method"], columns="measure", values="value", aggfunc="last", sort=False
    )
    cells = [[thousands(tokens), f"{what} {method}", *map(milliseconds, row)] for (tokens, what, method), row in by.iterrows()]
    return markdown_table(["tokens", "", *by.columns], cells)


def memory(folder: Path = FOLDER) -> list[str]:
    """MB of a call beyond query, key, value and output."""
    rows = rows_of("memory", "call", "extra_mb", folder)
    by = rows[rows["backend"] != "triton"].pivot_table(index="method", columns="tokens", values="value", aggfunc="last")
    cells = [[str(method), *("-" if pd.isna(value) else f"{value:,.0f}" for value in row)] for method, row in by.iterrows()]
    return markdown_table(["call, MB", *map(thousands, by.columns)], cells)


def compilation(folder: Path = FOLDER) -> list[str]:
    """First calls at forty lengths in mixed order."""
    seconds, graphs = (rows_of("compile", "call", measure, folder) for measure in ("first_call_s", "graphs"))
    cells = []
    for (method, backend), own in seconds.groupby(["method", "backend"]):
        made = graphs[(graphs["method"] == method) & (graphs["backend"] == backend)]["value"].max()
        first = ", ".join(f"{value:.1f}" for value in own["value"].nlargest(3))
        cells.append([f"{method}, {backend}", str(len(own)), f"{own['value'].sum():.1f}", first, f"{made:.0f}"])
    return markdown_table(["call", "lengths", "all first calls, s", "longest, s", "graphs"], cells)


def draw_calls(axes: Any, folder: Path = FOLDER) -> bool:
    rows = rows_of("latency", "call", "eager_ms", folder)
    rows = rows[(rows["method"] == "flexprefill") & rows["backend"].isin(["flash", "cpu"]) & rows["share"].notna()]
    rows = rows[rows["tokens"].isin([2**power for power in range(14, 18)])]  # below, plain calls are launch-bound
    for tokens, own in rows.groupby("tokens"):
        own = own.sort_values("density").drop_duplicates("density", keep="last")
        if len(own) > 2:
            axes.plot(own["density"], 1 / own["share"], marker="o", label=f"{thousands(tokens)} tokens")
    axes.axhline(1, color="#444444", linewidth=0.8)
    axes.set(xlabel="density: kept blocks / visible blocks", ylabel="times as fast as the fastest dense kernel", yscale="log")
    if len(rows):
        axes.legend(frameon=False, fontsize=9)
    return bool(len(rows))


TABLES: dict[str, Callable[[Path], list[str]]] = {
    "dense": dense,
    "calls": calls,
    "masks": masks,
    "stages": stages,
    "memory": memory,
    "compilation": compilation,
}
FIGURES: dict[str, Callable[[Any, Path], bool]] = {"speed-calls": draw_calls}
