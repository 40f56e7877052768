"""Gain and price of gamma: answers in transformers, and first tokens in vLLM 0.33, of the 1.5B on an H200."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from bench import intervals
from bench.answers import table
from bench.answers.ruler import TASKS as RULER
from bench.report import LINES
from bench.report.answers import GAMMAS, HYBRID, changes_of_means, pairs
from bench.report.first_token import vllm_rows
from bench.report.rows import FOLDER, percent
from bench.report.trained import NAME
from bench.tables import markdown_table, thousands

CHOSEN = 0.9
_RUN = "texts, YaRN 4, by gamma"
_TEXTS = (0, 1)  # that every gamma ran
_SHOWN = ("dialogue", "niah_multikey_2", "ruler_fwe", "niah_multivalue")


def first_tokens(folder: Path, chunk: int | None) -> pd.DataFrame:
    """Mean `seconds` and `density` over the texts that every gamma ran, and `ratio` to dense, by prompt tokens and gamma."""
    rows = vllm_rows(folder, "first_seconds", chunk=chunk, model=NAME, vllm="0.33.0", device="NVIDIA H200")
    found = pd.DataFrame([row for row in rows if row["run"] == _RUN])
    dense = found[found["method"] == "stock"].groupby("prompt_tokens")["seconds"].mean()
    own = found[found["method"].str.startswith("hybrid") & found["prompt"].isin(_TEXTS)]
    gammas = own["method"].str.partition("gamma ")[2].replace("", str(CHOSEN)).astype(float)
    means = own.assign(gamma=gammas).groupby(["prompt_tokens", "gamma"])[["seconds", "density"]].mean()
    return means.assign(ratio=dense / means["seconds"])


def speeds(folder: Path = FOLDER) -> list[str]:
    """Speedups of first tokens with the blocks kept, a column per gamma."""
    lines = []
    for chunk, place in ((None, "whole"), (8192, "chunks of 8k")):
        for tokens, rows in first_tokens(folder, chunk).groupby(level="prompt_tokens"):
            cells = [f"{row['ratio']:.2f}x ({percent(row['density'])})" for _, row in rows.iterrows()]
            lines.append([f"{thousands(int(str(tokens)))}, {place}", *cells])
    return markdown_table(["prompt, two texts", *(f"gamma {gamma}" for gamma in GAMMAS)], lines)


def draw(axes: Any, folder: Path = FOLDER) -> None:
    """Points and dlp by kept blocks, beside the speedups at 32k tokens; a ring at the default."""
    axes.axis("off")
    upper, lower = axes.inset_axes((0.05, 0.52, 0.5, 0.43)), axes.inset_axes((0.05, 0.0, 0.5, 0.43))
    right = axes.inset_axes((0.68, 0.0, 0.32, 0.95))
    found = pairs(folder, 32768)
    for task, (colour, marker, dash) in zip(_SHOWN, LINES[1:], strict=False):
        own = [found[task, setting] for setting in HYBRID]
        kept = [100 * each.mean(each.ours, "density") for each in own]
        style = {"color": colour, "marker": marker, "linestyle": dash, "markersize": 4, "linewidth": 1, "label": task}
        points = [[100 * value for value in each.differences("parts")] for each in own]
        _errors(upper, kept, [(float(np.mean(each)), intervals.of_mean(each)) for each in points], style)
        dlp = [table.mean_and_error(each.differences("logp")) for each in own]
        _errors(lower, kept, [(mean, (mean - error, mean + error)) for mean, error in dlp], style)
    ruler = [[found[task, setting] for task in RULER] for setting in HYBRID]
    kept = [100 * float(np.mean([each.mean(each.ours, "density") for each in tasks])) for tasks in ruler]
    means = [(after - before, bounds) for before, after, bounds in map(changes_of_means, ruler)]
    colour, marker, dash = LINES[0]
    _errors(upper, kept, means, {"color": colour, "marker": marker, "linestyle": dash, "label": "RULER, 10 tasks"})
    upper.set_title("right answers: change, points", fontsize=9)
    lower.set_title("log-probability of the answer: dlp, nats", fontsize=9)
    lower.set_xlabel("kept blocks, %; from left to right gamma " + ", ".join(map(str, GAMMAS)), fontsize=8)
    upper.legend(frameon=False, fontsize=7, loc="lower right")
    for chunk, name, (colour, marker, dash) in ((None, "whole prompt", LINES[0]), (8192, "chunks of 8k", LINES[6])):
        ratios = list(first_tokens(folder, chunk).loc[32768]["ratio"])
        right.plot(range(len(ratios)), ratios, color=colour, marker=marker, linestyle=dash, label=name)
        _ring(right, GAMMAS.index(CHOSEN), ratios[GAMMAS.index(CHOSEN)])
    right.set_xticks(range(len(GAMMAS)), GAMMAS)
    right.set(ylim=(0.9, None), xlabel="gamma (ring: the default)")
    right.set_title("first token at 32k:\ndense time / ours", fontsize=9)
    right.legend(frameon=False, fontsize=8, loc=(0.02, 0.2))
    upper.set_xticklabels([])
    for each in (upper, lower, right):
        each.axhline(each is right, color="#888888", linewidth=0.8)
        each.tick_params(labelsize=8)


def _errors(axes: Any, kept: list[float], values: list[tuple[float, tuple[float, float]]], style: dict[str, Any]) -> None:
    means = [mean for mean, _ in values]
    axes.errorbar(kept, means, yerr=np.abs([[mean - low, high - mean] for mean, (low, high) in values]).T, **style)
    _ring(axes, kept[GAMMAS.index(CHOSEN)], means[GAMMAS.index(CHOSEN)])


def _ring(axes: Any, at: float, value: float) -> None:
    axes.plot(at, value, "o", color="black", markersize=9, fillstyle="none")


TABLES: dict[str, Callable[[Path], list[str]]] = {"gamma-speeds": speeds}
