"""Greedy answers of Qwen2.5-Coder-1.5B-Instruct in transformers and in vLLM, on the same prompts of 32k tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from bench.answers import table
from bench.answers.prompts import TASKS
from bench.report.rows import FOLDER
from bench.rows import read_rows
from bench.tables import markdown_table

FILE = "greedy-nvidia-h200.jsonl"


class Run(NamedTuple):
    """An engine with a setting; `how` it prefills."""

    engine: str
    method: str
    how: str = "whole"

    def __str__(self) -> str:
        words = self.how.replace("chunks", "chunks of 8k").removeprefix("whole")
        return f"{'vLLM' if self.engine == 'vllm' else self.engine}, {self.method}{words and ', ' + words}"


ADAPTER, ENGINE = (tuple(Run(engine, method) for method in ("dense", "hybrid 0.9")) for engine in ("transformers", "vllm"))
CHUNKS = Run("vllm", "hybrid 0.9", "chunks")
COLUMNS = (*ADAPTER, *ENGINE, CHUNKS)
COMPARED = (
    ADAPTER,
    ENGINE,
    (Run("vllm", "dense", "chunks"), CHUNKS),
    (ENGINE[1], CHUNKS),
    *zip(ADAPTER, ENGINE, strict=True),
    (ENGINE[0], Run("vllm", "dense", "chunks")),
    (Run("vllm", "dense", "chunks"), Run("vllm", "dense", "chunks, 4 at once")),
)
Row = dict[str, Any]


def runs(folder: Path = FOLDER) -> dict[Run, dict[tuple[str, int], Row]]:
    """Rows of each run by task and prompt."""
    found: dict[Run, dict[tuple[str, int], Row]] = {}
    for row in read_rows(folder / FILE):
        if "task" in row:
            found.setdefault(Run(row["engine"], row["method"], row["how"]), {})[row["task"], row["index"]] = row
    return found


def _by_task(values: dict[tuple[str, int], float]) -> dict[str, list[float]]:
    tasks = {task: [value for (name, _), value in values.items() if name == task] for task in TASKS}
    return {task: each for task, each in tasks.items() if each}


def scores(folder: Path = FOLDER) -> list[str]:
    """Scores of 100 of each run by task, and their mean over the tasks."""
    found = runs(folder)
    means = [_by_task({prompt: row["score"] for prompt, row in found[run].items()}) for run in COLUMNS]
    lines = [[f"`{task}`", str(len(means[0][task])), *(_score(each[task]) for each in means)] for task in means[0]]
    whole = [_score([np.mean(values) for values in each.values()]) for each in means]
    lines.append([f"mean of {len(means[0])} tasks", str(len(found[COLUMNS[0]])), *whole])
    return markdown_table(["task", "prompts", *map(str, COLUMNS)], lines)


def _score(values: Sequence[Any]) -> str:
    return f"{100 * np.mean(values):.1f}"


def changes(folder: Path = FOLDER) -> list[str]:
    """Compare two runs on the same prompts; texts are the same if they are up to the end of the shorter one.

    transformers decodes behind the end token, so its texts are not compared with each other.
    """
    found, lines = runs(folder), []
    for before, after in COMPARED:
        both = {prompt: (found[before][prompt], row) for prompt, row in found[after].items() if prompt in found[before]}
        tasks = _by_task({prompt: float(row["score"]) - float(other["score"]) for prompt, (other, row) in both.items()})
        change = float(np.mean([np.mean(values) for values in tasks.values()]))
        texts = [sorted((row["text"], other["text"]), key=len) for other, row in both.values()]
        same = f"{sum(longer.startswith(shorter) for shorter, longer in texts)} of {len(both)}" if after.engine == "vllm" else "-"
        moved = sum(value != 0 for values in tasks.values() for value in values)
        points = table.points(change, table.of_task_means(list(tasks.values())))
        lines.append([str(before), str(after), points, f"{moved} of {len(both)}", same])
    return markdown_table(["from", "to", "points", "other scores", "same texts"], lines)


TABLES: dict[str, Callable[[Path], list[str]]] = {"greedy": scores, "greedy-changes": changes}
