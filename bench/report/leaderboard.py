"""The leaderboard: methods by error at equal density."""

from __future__ import annotations

import math
from pathlib import Path

import pandas as pd

from bench.report.fidelity import against_dense, fewest_blocks, needle_rows, task_rows
from bench.report.rows import ERROR, FOLDER, NAMES, Curves, interval, number, percent, read, usual
from bench.report.speed import milliseconds, rows_of
from bench.tables import markdown_table, thousands
from flexmask import block_masks

MODEL, YARN, TOKENS = "SmolLM2-135M", 2, 16384
DENSITIES = (0.1, 0.2, 0.3)
TASK_TOKENS = 32768
MASK_TOKENS = 131072
# keeps every block
LEFT_OUT = "causal"


def methods() -> list[str]:
    """The library's methods except `LEFT_OUT`."""
    return [name for name in (each.removesuffix("_mask") for each in block_masks.__all__) if name != LEFT_OUT]


def error_rows(folder: Path = FOLDER) -> pd.DataFrame:
    """Rows on the held-out texts of the repository; methods without a usual setting count with all settings."""
    rows = read("lengths", folder)
    rows = rows[(rows["model"] == MODEL) & (rows["yarn"] == YARN) & (rows["length"] == TOKENS) & rows["chunk"].isna()]
    rows = rows[rows["text"].str.startswith("test/")]
    chosen = usual(rows)
    return pd.concat([chosen, rows[~rows["method"].isin(chosen["method"])]])


def mask_times(folder: Path = FOLDER) -> dict[str, tuple[str, str]]:
    """By method: milliseconds of a mask in a CUDA graph and its density, of the last row."""
    rows = rows_of("latency,equal error", "mask", "graph_ms", folder)
    # a row under the method's defaults counts before one at equal error
    rows = rows[rows["tokens"] == MASK_TOKENS].sort_values("part", key=lambda parts: parts == "latency", kind="stable")
    last = rows.groupby("method").last()
    return {str(method): (milliseconds(row["value"]), percent(row["density"], 0)) for method, row in last.iterrows()}


def table(folder: Path = FOLDER) -> list[str]:
    """Rows by error at a density of 20%, then 30%, 10%, then name."""
    rows, needles, masks, tasks = error_rows(folder), needle_rows(folder), mask_times(folder), task_rows(folder, TASK_TOKENS)
    curves = Curves(rows, "abs_d")
    errors = {method: [curves.error_at(method, density) for density in DENSITIES] for method in methods()}

    def rank(method: str) -> tuple[float | str, ...]:
        lowest, middle, highest = (math.inf if math.isnan(error) else error for error in errors[method])
        return middle, highest, lowest, method

    cells = []
    for method in sorted(errors, key=rank):
        figures = [number(error) for error in errors[method]]
        figures[1] += interval(*curves.interval_at(method, DENSITIES[1]))
        own = needles[needles["method"] == method]
        fewest = fewest_blocks(needles, method)
        all_found = percent(fewest, 0) if len(own) == 0 or not math.isnan(fewest) else f"misses {1 - own['found'].max():.0%}"
        cells.append(
            [NAMES.get(method, method), *figures, all_found, *against_dense(tasks, method), *masks.get(method, ("-", "-"))]
        )
    head = [
        "method",
        *(f"{ERROR} at {density:.0%} of the blocks" for density in DENSITIES),
        "fewest blocks that find every needle",
        "RULER: points against dense",
        "RULER: blocks kept",
        f"mask at {thousands(MASK_TOKENS)}, ms",
        "mask: blocks kept",
    ]
    return markdown_table(head, cells)


TABLES = {"leaderboard": table}
