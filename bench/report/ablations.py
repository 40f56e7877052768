"""Changes by other selections against hybrid on the same prompts; rows of `bench.answers`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np

from bench.answers import table
from bench.answers.prompts import TASKS
from bench.report.rows import FOLDER, percent
from bench.rows import read_rows
from bench.tables import markdown_table

WHOLE = ("ablations-nvidia-h200.jsonl", "mean-correction-nvidia-h200.jsonl")
IN_CHUNKS = ("chunk-ablations-nvidia-h200.jsonl",)
CHUNK_S = "the chunk's N"


def dlp_by_task(folder: Path = FOLDER, files: Sequence[str] = WHOLE, base: str = "hybrid 0.9") -> list[str]:
    """Change of dlp against `base` with its standard error by task, and the mean density of both."""
    found: dict[tuple[str, str], table.Pairs] = {}
    for name in files:
        found |= table.paired(({**row, "chunk": None} for row in read_rows(folder / name)), base)
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
        densities.append(f"{percent(ours)} ({percent(others)})")
    return markdown_table(["task", *settings], [*lines, ["blocks (base)", *densities]])


TABLES: dict[str, Callable[[Path], list[str]]] = {
    "ablations": dlp_by_task,
    "ablations-chunks": partial(dlp_by_task, files=IN_CHUNKS, base=CHUNK_S),
}
