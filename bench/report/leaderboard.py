"""The leaderboard: methods by error at equal density."""

from __future__ import annotations

import math
from pathlib import Path

import pandas as pd

from bench.report.fidelity import DENSITIES, LENGTHS_COMMAND, against_dense, missing, needle_rows
from bench.report.rows import FOLDER, NAMES, Curves, number, read, usual
from bench.report.speed import milliseconds
from bench.tables import markdown_table, thousands
from flexmask import block_masks

MODEL, YARN, TOKENS = "SmolLM2-135M", 2, 16384
TASK_TOKENS = 32768
MASK_TOKENS = (32768, 131072)
# keeps every block
LEFT_OUT = "causal"


def methods() -> list[str]:
    """The library's methods except `LEFT_OUT`."""
    return [name for name in (each.removesuffix("_mask") for each in block_masks.__all__) if name != LEFT_OUT]


def errors(folder: Path = FOLDER) -> Curves:
    """Error by density on the held-out texts; methods without a usual setting count with all settings."""
    rows = read("lengths", folder)
    rows = rows[(rows["model"] == MODEL) & (rows["yarn"] == YARN) & (rows["length"] == TOKENS) & rows["chunk"].isna()]
    rows = rows[rows["text"].str.startswith("test/")]
    chosen = usual(rows)
    return Curves(pd.concat([chosen, rows[~rows["method"].isin(chosen["method"])]]), "abs_d")


def densities(curves: Curves, method: str) -> str:
    """Range of a method's measured densities."""
    found = curves.settings(method)
    ends = dict.fromkeys(f"{each:.0%}" for each in (found[0, 0], found[-1, 0])) if len(found) else {"-": None}
    return " to ".join(ends)


def mask_times(folder: Path = FOLDER) -> dict[tuple[str, int], str]:
    """By method and length: milliseconds of a mask in a CUDA graph, and its density, of the last row."""
    rows = read("speed", folder)
    chosen = (rows["what"] == "mask") & (rows["measure"] == "graph_ms") & (rows["input"] == "structured")
    rows = rows[chosen & rows["tokens"].isin(MASK_TOKENS)]
    # a row under the method's defaults counts before one at equal error
    rows = rows.sort_values("part", key=lambda parts: parts == "latency", kind="stable")
    last = rows.groupby(["method", "tokens"]).last()
    return {key: f"{milliseconds(float(row['value']))} at {row['density']:.0%}" for key, row in last.iterrows()}


def needles_found(rows: pd.DataFrame, method: str) -> str:
    """Lowest density at which a method finds every needle that dense attention finds, or its best share."""
    own = rows[rows["method"] == method]
    if own.empty:
        return "-"
    every = own[own["found"] >= rows[rows["method"] == "dense"]["found"].max()]
    return f"all at {every['density'].min():.0%}" if len(every) else f"{own['found'].max():.0%} at best"


def table(folder: Path = FOLDER) -> list[str]:
    """Rows by error at a density of 20%, then 30%, 10%, then name."""
    tasks = read("retrieval", folder)
    if tasks.empty or read("lengths", folder).empty or read("speed", folder).empty:
        return missing(LENGTHS_COMMAND)
    curves, needles, masks = errors(folder), needle_rows(folder), mask_times(folder)
    tasks = usual(tasks[(tasks["bed"] == "tasks") & (tasks["tokens"] == TASK_TOKENS) & tasks["each"].notna()])
    found = {method: [curves.error_at(method, density) for density in DENSITIES] for method in methods()}

    def rank(method: str) -> tuple[float | str, ...]:
        lowest, middle, highest = (math.inf if math.isnan(error) else error for error in found[method])
        return middle, highest, lowest, method

    cells = []
    for method in sorted(found, key=rank):
        figures = [number(error) for error in found[method]]
        low, high = curves.interval_at(method, DENSITIES[1])
        figures[1] += f" [{low:.2f}, {high:.2f}]" if math.isfinite(low) else ""
        times = [masks.get((method, tokens), "-") for tokens in MASK_TOKENS]
        figures.append(densities(curves, method))
        found_needles, points = needles_found(needles, method), against_dense(tasks, method, ".0%")
        cells.append([NAMES.get(method, method), *figures, found_needles, points, *times])
    head = [
        "method",
        *(f"error at {density:.0%}" for density in DENSITIES),
        "measured at",
        "needles",
        "RULER's tasks, points",
        *(f"mask at {thousands(tokens)}, ms" for tokens in MASK_TOKENS),
    ]
    return markdown_table(head, cells)


TABLES = {"leaderboard": table}
