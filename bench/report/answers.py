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
    """By task and setting, of prompts of a length; chunks are compared with whole prompts."""
    rows = [row for row in read_rows(folder / FILE) if row["length"] == length]
    ours = [row for row in rows if row["setting"] in chosen and row["chunk"] == chunk]
    others = [{**row, "chunk": chunk} for row in rows if row["setting"] == against and row["chunk"] is None]
    return table.paired([*ours, *others], against)


# what a cell may say of a setting
FIGURES = ("points", "dlp", "blocks", "prompts")


def by_task(
    folder: Path = FOLDER,
    length: int = 32768,
    chunk: int | None = None,
    against: str = "dense",
    chosen: Sequence[str] = HYBRID,
    figures: Sequence[str] = FIGURES,
) -> list[str]:
    """Right parts of `against` on the most prompts, and `figures` of each chosen setting: a column each, or one cell of all.

    Figures are the change in points with its interval, dlp, the density, the number of prompts. The last line has RULER's mean of
    each setting that ran all of its tasks; its interval draws prompts within tasks.
    """
    found = pairs(folder, length, chunk, against, chosen)
    settings = sorted({label for _, label in found}, key=lambda label: chosen.index(label.partition(",")[0]))
    # of several settings a cell has all
    apart = len(settings) == 1
    lines = []
    for task in TASKS:
        of_task = [found.get((task, each)) for each in settings]
        if any(of_task):
            most = max(filter(None, of_task), key=lambda pairs: len(pairs.ours))
            lines.append(
                [f"`{task}`", _right([most]), *_cells([_of_task(each) if each else {} for each in of_task], figures, apart)]
            )
    whole = [[found[task, each] for task in RULER] if all((task, each) in found for task in RULER) else [] for each in settings]
    if any(whole):
        most_prompts = max(whole, key=lambda tasks: sum(len(each.ours) for each in tasks))
        means = [_of_ruler(tasks) if tasks else {} for tasks in whole]
        lines.append([f"RULER, {len(RULER)} tasks", _right(most_prompts), *_cells(means, figures, apart)])
    return markdown_table(["task", against, *(figures if apart else settings)], lines)


def _cells(found: Sequence[dict[str, str]], figures: Sequence[str], apart: bool) -> list[str]:
    """Figures by setting as cells; those that a mean lacks are left out."""
    if apart:
        return [found[0].get(figure, "-") for figure in figures]
    return ["; ".join(each[figure] for figure in figures if figure in each) or "-" for each in found]


def _right(tasks: list[table.Pairs]) -> str:
    return f"{100 * table.mean_of_tasks(tasks, 'parts', 'others'):.1f}"


def _of_task(pairs: table.Pairs) -> dict[str, str]:
    changes = pairs.differences("parts")
    mean, error = table.mean_and_error(pairs.differences("logp"))
    return {
        "points": table.points(float(np.mean(changes)), intervals.of_mean(changes)),
        "dlp": f"{mean:+.2f} ± {error:.2f}",
        "blocks": percent(pairs.mean(pairs.ours, "density")),
        "prompts": str(len(changes)),
    }


def _of_ruler(tasks: list[table.Pairs]) -> dict[str, str]:
    """Log-probabilities of answers of different lengths have no mean."""
    before, after, (low, high) = changes_of_means(tasks)
    return {
        "points": f"{after - before:+.1f} [{low:+.1f}, {high:+.1f}]",
        "blocks": percent(table.mean_of_tasks(tasks, "density")),
        "prompts": str(sum(len(each.ours) for each in tasks)),
    }


def changes_of_means(tasks: list[table.Pairs]) -> tuple[float, float, tuple[float, float]]:
    """Right parts of 100, mean of the tasks: of the others, of ours, and the interval of the change."""
    before, after = 100 * table.mean_of_tasks(tasks, "parts", "others"), 100 * table.mean_of_tasks(tasks, "parts")
    low, high = table.of_task_means([each.differences("parts") for each in tasks])
    return before, after, (100 * low, 100 * high)


POINTS, REST = ("points",), ("dlp", "blocks", "prompts")
TABLES: dict[str, Callable[[Path], list[str]]] = {
    "answers": partial(by_task, figures=POINTS),
    "answers-dlp": partial(by_task, figures=REST),
    "answers-others": partial(by_task, chosen=OTHERS, figures=POINTS),
    "answers-others-dlp": partial(by_task, chosen=OTHERS, figures=REST),
    "answers-against-hybrid": partial(by_task, against="hybrid 0.9", chosen=OTHERS, figures=("points", "dlp")),
    "answers-chunks": partial(by_task, chunk=8192),
    "answers-64k": partial(by_task, length=65536),
    "answers-64k-chunks": partial(by_task, length=65536, chunk=8192),
}
