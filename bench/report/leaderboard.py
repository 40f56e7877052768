"""The leaderboard: methods by error at equal density."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd

from bench.intervals import of_mean
from bench.report.fidelity import DEFAULT
from bench.report.rows import ERROR, FOLDER, NAMES, Curves, interval, number, percent, read, usual
from bench.report.speed import milliseconds, rows_of
from bench.tables import markdown_table
from flexmask import block_masks

DENSITIES = (0.1, 0.2, 0.3)
NEEDLES = [("needle-1", 16384), ("needle-64", 16384), ("needle-1", 32768)]
SCORED = 0.8  # least dense score of a task that methods are compared on
HEAD = [
    "method",
    *(f"{ERROR} at {density:.0%} of the blocks" for density in DENSITIES),
    "fewest blocks that find every needle",
    "RULER: points against dense",
    "RULER: density",
    "mask at 128k, ms",
    "mask: density",
]


def error_rows(folder: Path) -> pd.DataFrame:
    """Rows on the held-out texts of the repository; methods without a usual setting count with all settings."""
    rows = read("lengths", folder)
    rows = rows[(rows["model"] == "SmolLM2-135M") & (rows["yarn"] == 2) & (rows["length"] == 16384) & rows["chunk"].isna()]
    rows = rows[rows["text"].str.startswith("test/") & ~rows["options"].str.contains('"min_coverage": 0.5')]
    chosen = usual(rows)
    return pd.concat([chosen, rows[~rows["method"].isin(chosen["method"])]])


def needles(folder: Path) -> dict[str, str]:
    """By method: lowest density at which it finds every needle that dense attention finds, or the share that it misses."""
    rows = read("retrieval", folder)
    chosen = pd.MultiIndex.from_frame(rows[["task", "tokens"]]).isin(NEEDLES)
    rows = usual(rows[chosen & rows["chunk"].isna()]).drop_duplicates(["method", "options", "task", "tokens"], keep="last")
    by = rows.groupby(["method", "options"]).agg({"task": "size", "n": "sum", "right": "sum", "density": "mean"}).reset_index()
    by = by[by["task"] == len(NEEDLES)].assign(found=by["right"] / by["n"])
    every = by[by["found"] >= by[by["method"] == "dense"]["found"].max()].groupby("method")["density"].min()
    best = by.groupby("method")["found"].max()
    return {method: percent(every[method], 0) if method in every else f"misses {1 - best[method]:.0%}" for method in best.index}


def ruler(folder: Path) -> dict[str, tuple[str, str]]:
    """By method: points against dense attention, and density, of its setting with the most prompts; hybrid's is its default."""
    rows = read("retrieval", folder)
    rows = usual(rows[(rows["bed"] == "tasks") & (rows["tokens"] == 32768) & rows["each"].notna() & rows["chunk"].isna()])
    rows = rows[(rows["method"] != "hybrid") | (rows["options"] == DEFAULT)]
    densities = rows.groupby(["method", "options"])["density"].mean()
    # a row per prompt: the share of right answer tokens
    rows = rows.assign(score=rows["each"].map(list), prompt=[range(first, first + n) for first, n in rows[["first", "n"]].values])
    rows = rows.explode(["score", "prompt"])
    rows["score"] = rows["score"].astype(int) / rows["answer_tokens"]
    rows = rows.drop_duplicates(["method", "options", "task", "prompt"], keep="last")
    dense = rows[rows["method"] == "dense"].set_index(["task", "prompt"])["score"]
    solved = dense[dense.groupby("task").transform("mean") >= SCORED].rename("dense")
    both = rows[rows["method"] != "dense"].join(solved, ["task", "prompt"], "inner")
    found: dict[str, tuple[str, str]] = {}
    by_size = sorted(both.groupby(["method", "options"]), key=lambda each: len(each[1]))
    for (method, options), own in by_size:
        changes = list(100 * (own["score"] - own["dense"]))
        found[method] = (f"{np.mean(changes):+.1f}{interval(*of_mean(changes), '+.1f')}", percent(densities[method, options]))
    return found


def masks(folder: Path) -> dict[str, tuple[str, str]]:
    """By method: milliseconds of a mask in a CUDA graph and its density, of the last row."""
    rows = rows_of("latency,equal error", "mask", "graph_ms", folder)
    # a row under the method's defaults counts before one at equal error
    rows = rows[rows["tokens"] == 131072].sort_values("part", key=lambda parts: parts == "latency", kind="stable")
    last = rows.groupby("method").last()
    return {str(method): (milliseconds(row["value"]), percent(row["density"], 0)) for method, row in last.iterrows()}


def table(folder: Path = FOLDER) -> list[str]:
    """Rows by error at a density of 20%, then 30%, 10%, then name."""
    curves, found, scores, timed = Curves(error_rows(folder)), needles(folder), ruler(folder), masks(folder)
    # causal keeps every block
    methods = [name.removesuffix("_mask") for name in block_masks.__all__ if name != "causal_mask"]
    errors = pd.DataFrame([[curves.error_at(method, density) for density in DENSITIES] for method in methods], methods, DENSITIES)
    cells = []
    for method, (low, middle, high) in errors.sort_index().sort_values([0.2, 0.3, 0.1], kind="stable").iterrows():
        middle_text = number(middle) + interval(*curves.interval_at(method, 0.2))
        cells.append([NAMES.get(method, method), number(low), middle_text, number(high), found.get(method, "-")])
        cells[-1] += [*scores.get(method, ("-", "-")), *timed.get(method, ("-", "-"))]
    return markdown_table(HEAD, cells)


TABLES = {"leaderboard": table}
