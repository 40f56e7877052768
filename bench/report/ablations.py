"""What other selections change against hybrid at gamma 0.9 on the same prompts; rows of `bench.answers`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np

from bench.answers import table
from bench.answers.prompts import TASKS
from bench.report.rows import FOLDER, percent
from bench.rows import read_rows
from bench.tables import markdown_table

BASE = "hybrid 0.9"
FILES = ("ablations-nvidia-h200.jsonl", "mean-correction-nvidia-h200.jsonl")


def dlp_by_task(folder: Path = FOLDER) -> list[str]:
    """Change of dlp with its standard error by task, and the mean density of both."""
    found: dict[tuple[str, str], table.Pairs] = {}
    for name in FILES:
        found |= table.paired(read_rows(folder / name), BASE)
    settings = list(dict.fromkeys(setting for _, setting in found))
    lines = []
    for task in (task for task in TASKS if any((task, setting) in found for setting in settings)):
        cells = []
        for setting in settings:
            pairs = found.get((task, setting))
            mean, error = table.mean_and_error(pairs.differences("logp")) if pairs else (0.0, 0.0)
            cells.append(f"{mean:+.2f} ± {error:.2f}" if pairs else "-")
        lines.append([f"`{task}`", *cells])
    densities = []
    for setting in settings:
        of_setting = [pairs for (_, name), pairs in found.items() if name == setting]
        ours, others = (
            float(np.mean([pairs.mean(getattr(pairs, side), "density") for pairs in of_setting])) for side in ("ours", "others")
        )
        densities.append(f"{percent(ours)}, hybrid {percent(others)}")
    return markdown_table(["task", *settings], [*lines, ["blocks", *densities]])


TABLES: dict[str, Callable[[Path], list[str]]] = {"ablations": dlp_by_task}
