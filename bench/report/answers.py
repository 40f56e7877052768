"""Answers of Qwen2.5-Coder-1.5B-Instruct behind a sparse prefill, by task; rows of `bench.answers`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np

from bench import intervals
from bench.answers import table
from bench.answers.prompts import TASKS
from bench.answers.ruler import TASKS as RULER
from bench.report.rows import FOLDER, percent
from bench.rows import read_rows
from bench.tables import markdown_table

FILE = "answers-nvidia-h200.jsonl"
GAMMAS = (0.8, 0.9, 0.95, 0.97)
HYBRID = tuple(f"hybrid {gamma}" for gamma in GAMMAS)
OTHERS = ("flexprefill 0.65", "xattention 0.8")


def pairs(
    folder: Path, length: int, chunk: int | None = None, against: str = "dense", chosen: Sequence[str] = HYBRID
) -> dict[tuple[str, str], table.Pairs]:
    """By task and setting, of prompts of a length."""
    rows = [row for row in read_rows(folder / FILE) if (row["length"], row["chunk"]) == (length, chunk)]
    return table.paired((row for row in rows if row["setting"] in {against, *chosen}), against)


def by_task(
    folder: Path = FOLDER,
    length: int = 32768,
    chunk: int | None = None,
    against: str = "dense",
    chosen: Sequence[str] = HYBRID,
) -> list[str]:
    """Right parts of `against` on the most prompts; of each chosen setting the change in points, dlp, density and prompts.

    The last line has RULER's mean of each setting that ran all of its tasks; its interval draws prompts within tasks.
    """
    found = pairs(folder, length, chunk, against, chosen)
    settings = sorted({label for _, label in found}, key=lambda label: chosen.index(label.partition(",")[0]))
    lines = []
    for task in TASKS:
        of_task = [found.get((task, each)) for each in settings]
        if any(of_task):
            most = max(filter(None, of_task), key=lambda pairs: len(pairs.ours))
            lines.append([f"`{task}`", _right([most]), *(_cell(each) if each else "-" for each in of_task)])
    whole = [[found[task, each] for task in RULER] if all((task, each) in found for task in RULER) else [] for each in settings]
    if any(whole):
        lines.append(
            [
                f"RULER, {len(RULER)} tasks",
                _right(max(whole, key=lambda tasks: sum(len(each.ours) for each in tasks))),
                *map(_mean, whole),
            ]
        )
    return markdown_table(["task", against, *settings], lines)


def _right(tasks: list[table.Pairs]) -> str:
    return f"{100 * table.mean_of_tasks(tasks, 'parts', 'others'):.1f}"


def _cell(pairs: table.Pairs) -> str:
    points = table.points(float(np.mean(changes := pairs.differences("parts"))), intervals.of_mean(changes))
    mean, error = table.mean_and_error(pairs.differences("logp"))
    return f"{points}; {mean:+.2f} ± {error:.2f}; {percent(pairs.mean(pairs.ours, 'density'))}; {len(changes)}"


def changes_of_means(tasks: list[table.Pairs]) -> tuple[float, float, tuple[float, float]]:
    """Right parts of 100, mean of the tasks: of the others, of ours, and the interval of the change."""
    before, after = 100 * table.mean_of_tasks(tasks, "parts", "others"), 100 * table.mean_of_tasks(tasks, "parts")
    low, high = table.of_task_means([each.differences("parts") for each in tasks])
    return before, after, (100 * low, 100 * high)


def _mean(tasks: list[table.Pairs]) -> str:
    if not tasks:
        return "-"
    before, after, (low, high) = changes_of_means(tasks)
    density = table.mean_of_tasks(tasks, "density")
    count = sum(len(each.ours) for each in tasks)
    return f"{after - before:+.1f} [{low:+.1f}, {high:+.1f}]; {percent(density)}; {count}"


TABLES: dict[str, Callable[[Path], list[str]]] = {
    "answers": by_task,
    "answers-others": partial(by_task, chosen=OTHERS),
    "answers-against-hybrid": partial(by_task, against="hybrid 0.9", chosen=OTHERS),
    "answers-chunks": partial(by_task, chunk=8192),
    "answers-64k": partial(by_task, length=65536),
}
