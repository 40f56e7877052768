"""What Qwen2.5-Coder-1.5B-Instruct answers behind a sparse prefill, by task; rows of `bench.answers`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np

from bench import intervals
from bench.answers import table
from bench.report.rows import FOLDER, percent
from bench.rows import read_rows
from bench.tables import markdown_table

FILE = "answers-nvidia-h200.jsonl"


def by_task(folder: Path = FOLDER, length: int = 32768, chunk: int | None = None) -> list[str]:
    """Right parts of dense answers; of each setting the change in points, dlp and the density."""
    rows = [row for row in read_rows(folder / FILE) if (row["length"], row["chunk"]) == (length, chunk)]
    found = table.paired(rows, "dense")
    settings = list(dict.fromkeys(label for _, label in found))
    lines = []
    for task in dict.fromkeys(task for task, _ in found):
        cells = []
        for setting in settings:
            if (task, setting) not in found:
                cells.append("-")
                continue
            pairs = found[task, setting]
            points = table.points(float(np.mean(changes := pairs.differences("parts"))), intervals.of_mean(changes))
            mean, error = table.mean_and_error(pairs.differences("logp"))
            cells.append(f"{points}; {mean:+.2f} ± {error:.2f}; {percent(pairs.mean(pairs.ours, 'density'))}")
        pairs = next(pairs for (name, _), pairs in found.items() if name == task)
        lines.append([f"`{task}`", str(len(pairs.ours)), f"{100 * pairs.mean(pairs.others, 'parts'):.1f}", *cells])
    return markdown_table(["task", "prompts", "dense", *settings], lines)


TABLES: dict[str, Callable[[Path], list[str]]] = {
    "answers": by_task,
    "answers-64k": partial(by_task, length=65536),
    "answers-chunks": partial(by_task, chunk=8192),
}
