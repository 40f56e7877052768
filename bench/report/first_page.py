"""README's table and picture: first tokens in vLLM 0.33 on an H200, and answers of the 1.5B in transformers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from bench import intervals
from bench.answers.prompts import TASKS
from bench.answers.ruler import TASKS as RULER
from bench.report import LINES
from bench.report.answers import changes_of_means, pairs
from bench.report.first_token import SHAPE, vllm_engines_in_turns
from bench.report.rows import FOLDER, percent
from bench.report.trained import NAME
from bench.tables import markdown_table, thousands

_LENGTHS = (32768, 65536, 131072)
_TIMED = {  # by name in the table: model and size of its chunks
    "8B shape, chunks of 8k": (SHAPE, 8192),
    "1.5B, chunks of 8k": (NAME, 8192),
    "1.5B, whole prompt": (NAME, None),
}
_SETTINGS = ("hybrid 0.9", "hybrid 0.95")


def _timed(folder: Path) -> dict[str, pd.DataFrame]:
    return {name: vllm_engines_in_turns(folder, model, chunk) for name, (model, chunk) in _TIMED.items()}


def brief(folder: Path = FOLDER) -> list[str]:
    """A column per length: speedups of first tokens, and right parts of RULER's tasks where all were run."""
    rows = [[name, *(f"{ratio:.2f}x" for ratio in timed["ratio"].loc[list(_LENGTHS)])] for name, timed in _timed(folder).items()]
    for place, chunk in (("whole", None), ("chunks of 8k", 8192)):
        rows.append([f"1.5B, right answers, {place}", *(_ruler(length, folder, chunk) for length in _LENGTHS)])
    return markdown_table(["dense → flexmask", "32k", "64k", "128k"], rows)


def _ruler(length: int, folder: Path, chunk: int | None) -> str:
    of_task = {
        task: made for (task, label), made in pairs(folder, length, chunk).items() if label.partition(",")[0] == _SETTINGS[0]
    }
    if not all(task in of_task for task in RULER):
        return "not run"
    before, after, (low, high) = changes_of_means([of_task[task] for task in RULER])
    return f"{before:.1f} → {after:.1f} [{low:+.1f}, {high:+.1f}]"


def engines(folder: Path = FOLDER) -> list[str]:
    """First tokens of both models, whole and in chunks, with what was kept."""
    cells = []
    for model, label, chunks in ((SHAPE, "8B shape", (8192, None)), (NAME, "1.5B", (8192, 32768, None))):
        for chunk in chunks:
            place = f"{label}, " + (f"chunks of {thousands(chunk)}" if chunk else "whole")
            for tokens, row in vllm_engines_in_turns(folder, model, chunk).iterrows():
                times = (f"{row['dense']:.3f} s", f"{row['sparse']:.3f} s", f"{row['ratio']:.2f}x")
                cells.append([place, thousands(int(str(tokens))), percent(row["density"]), *times])
                place = "the same"
    return markdown_table(["model", "prompt", "density", "dense", "`hybrid`", ""], cells)


def draw_gain_and_price(axes: Any, folder: Path = FOLDER) -> None:
    """Speedups of first tokens by length, beside each task's change at 32k tokens."""
    axes.axis("off")
    left, right = axes.inset_axes((0.0, 0.0, 0.38, 0.92)), axes.inset_axes((0.64, 0.0, 0.36, 0.92))
    for (name, timed), (colour, marker, dash) in zip(_timed(folder).items(), LINES, strict=False):
        ratios = timed["ratio"].loc[list(_LENGTHS)]
        left.plot(range(len(ratios)), list(ratios), color=colour, marker=marker, linestyle=dash, label=name)
    left.axhline(1, color="#888888", linewidth=0.8)
    left.set_xticks(range(len(_LENGTHS)), [thousands(length) for length in _LENGTHS])
    left.set(ylim=(0, None), xlabel="tokens", title="first token: dense time / ours")
    left.legend(frameon=False, fontsize=8)
    found = pairs(folder, 32768)
    tasks = [task for task in reversed(list(TASKS)) if (task, _SETTINGS[0]) in found]
    for shift, setting, (colour, marker, _) in zip((0.17, -0.17), _SETTINGS, LINES, strict=False):
        own = [(place, found[task, setting]) for place, task in enumerate(tasks) if (task, setting) in found]
        changes = [[100 * each for each in of_task.differences("parts")] for _, of_task in own]
        means, bounds = [float(np.mean(each)) for each in changes], [intervals.of_mean(each) for each in changes]
        errors = np.abs([[mean - low, high - mean] for mean, (low, high) in zip(means, bounds, strict=True)]).T
        places = [place + shift for place, _ in own]
        label = f"gamma {setting.split()[1]}"
        right.errorbar(means, places, xerr=errors, fmt=marker, color=colour, markersize=3, linewidth=1, label=label)
    right.axvline(0, color="#888888", linewidth=0.8)
    right.set_yticks(range(len(tasks)), tasks, fontsize=7)
    right.set(xlabel="points", title="right answers at 32k: change")
    right.legend(frameon=False, fontsize=8, loc="center left")


TABLES: dict[str, Callable[[Path], list[str]]] = {"brief": brief, "engines": engines}
