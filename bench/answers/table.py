"""Tables of rows, in Markdown: ``python -m bench.answers table ROWS...``.

By task and setting: prompts, the share answered right, what the setting changes in points with its 95% interval, dlp (the change
of the log-probability of the whole right answer, nats, mean and standard error) and density; all paired by prompt with dense, or
with ``--against`` a setting. *RULER* is the mean of the means of RULER's tasks that are there, density too; its interval is of a
bootstrap over the prompts of each task. dlp needs about a tenth of the prompts that a score needs.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from bench import intervals
from bench.answers.prompts import TASKS
from bench.answers.ruler import TASKS as RULER
from bench.rows import read_rows

SCORES = ("exact", "parts", "score")
Row = dict[str, Any]


class Pairs(NamedTuple):
    """A setting's rows of one task, and those of the setting it is compared with, on the same prompts."""

    ours: list[Row]
    others: list[Row]

    def mean(self, rows: list[Row], name: str) -> float:
        return float(np.mean([row[name] for row in rows]))

    def differences(self, name: str) -> list[float]:
        return [float(one[name]) - float(other[name]) for one, other in zip(self.ours, self.others, strict=True)]


def label(row: Row) -> str:
    return f"{row['setting']}, chunks of {row['chunk']:,}" if row["chunk"] else str(row["setting"])


def paired(rows: Iterable[Row], against: str) -> dict[tuple[str, str], Pairs]:
    """Pairs by task and setting, of the same prompt, length of chunks and model; later rows of a setting replace earlier ones."""
    known: dict[Any, dict[str, Row]] = {}
    for row in rows:
        prompt = tuple(row[name] for name in ("task", "length", "seed", "index", "chunk", "model"))
        known.setdefault(prompt, {})[row["setting"]] = row
    found: dict[tuple[str, str], Pairs] = {}
    for of_prompt in known.values():
        for row in of_prompt.values():
            if row["setting"] != against and against in of_prompt:
                pairs = found.setdefault((row["task"], label(row)), Pairs([], []))
                pairs.ours.append(row)
                pairs.others.append(of_prompt[against])
    return found


def mean_of_tasks(tasks: Sequence[Pairs], name: str, rows: Literal["ours", "others"] = "ours") -> float:
    """Mean of the tasks' means: every task weighs the same, however many prompts it has."""
    return float(np.mean([pairs.mean(getattr(pairs, rows), name) for pairs in tasks]))


def mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    """Mean and its standard error, NaN for a single value."""
    error = np.std(values, ddof=1) / math.sqrt(len(values)) if len(values) > 1 else math.nan
    return float(np.mean(values)), float(error)


def of_task_means(tasks: Sequence[Sequence[float]], seed: int = 0) -> tuple[float, float]:
    """95% interval of the mean of the tasks' means, by a bootstrap over the prompts of each."""
    rng, draws = np.random.default_rng(seed), np.zeros(intervals.DRAWS)
    for values in map(np.asarray, tasks):
        draws += values[rng.integers(len(values), size=(intervals.DRAWS, len(values)))].mean(1) / len(tasks)
    low, high = np.percentile(draws, [2.5, 97.5])
    return float(low), float(high)


def points(change: float, interval: tuple[float, float]) -> str:
    low, high = interval
    return f"{100 * change:+.1f} [{100 * low:+.1f}, {100 * high:+.1f}]"


def share(rows: list[Row], name: str) -> str:
    """Mean of a share that not all rows need to have."""
    found = [row[name] for row in rows if row.get(name) is not None]
    return f"{np.mean(found):.1%}" if found else ""


def lines(rows: Iterable[Row], score: str = "exact", against: str = "dense") -> list[str]:
    """The table's lines."""
    found = paired(rows, against)
    columns = ["task", "setting", "prompts", against, "setting's", "points", "dlp", "density", "kept, last row", "kept, all rows"]
    table = [f"| {' | '.join(columns)} |", "|" + "---|" * len(columns)]
    labels = list(dict.fromkeys(name for _, name in found))
    for task in TASKS:
        for name in labels:
            if (task, name) not in found:
                continue
            pairs = found[task, name]
            changes = pairs.differences(score)
            mean, error = mean_and_error(pairs.differences("logp"))
            cells = [
                *(f"`{task}`", name, str(len(changes))),
                *(f"{100 * pairs.mean(of, score):.1f}" for of in (pairs.others, pairs.ours)),
                *(points(float(np.mean(changes)), intervals.of_mean(changes)), f"{mean:+.2f} ± {error:.2f}"),
                *(share(pairs.ours, each) for each in ("density", "kept_last", "kept_rows")),
            ]
            table.append(f"| {' | '.join(cells)} |")
    for name in labels:
        tasks = [found[task, name] for task in RULER if (task, name) in found]
        if len(tasks) > 1:
            of_tasks = [pairs.differences(score) for pairs in tasks]
            before, after = mean_of_tasks(tasks, score, "others"), mean_of_tasks(tasks, score)
            prompts = str(sum(len(of_task) for of_task in of_tasks))
            cells = [f"RULER, {len(tasks)} tasks", name, prompts, f"{100 * before:.1f}", f"{100 * after:.1f}"]
            cells += [points(after - before, of_task_means(of_tasks)), "", f"{mean_of_tasks(tasks, 'density'):.1%}", "", ""]
            table.append(f"| {' | '.join(cells)} |")
    return table


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("rows", type=Path, nargs="+", help="files of `run`")
    parser.add_argument("--against", default="dense", help="the setting to compare with, prompt by prompt (dense)")
    parser.add_argument("--score", choices=SCORES, default="exact", help="exact answers, right parts, or RULER's score (exact)")


def main(options: argparse.Namespace) -> None:
    print("\n".join(lines((row for path in options.rows for row in read_rows(path)), options.score, options.against)))
