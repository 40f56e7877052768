"""Measured rows: ``bench/results/fidelity-<device>.jsonl``, one line for each method and text or task."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

PATH = Path(__file__).parents[1] / "results" / "fidelity-nvidia-h200.jsonl"
TEXT_FIGURES = ("density", "dloss", "absd")
_KEPT = ("bed", "method", "text", "task", "density", "dloss", "absd", "loss", "loss_quarters", "right", "n")
_DIGITS = 5


@dataclass
class Results:
    """Rows by method.

    Attributes
    ----------
    texts
        ``texts[method][text]`` is (density, change of the loss, mean absolute change of a log-probability).
    needles
        ``needles[method][task]`` is (density, right answers, prompts).
    """

    texts: dict[str, dict[str, tuple[float, ...]]] = field(default_factory=dict)
    needles: dict[str, dict[str, tuple[float, int, int]]] = field(default_factory=dict)

    def on(self, method: str, texts: Iterable[str]) -> np.ndarray | None:
        """(texts, 3) figures of a method; None unless it was measured on all of them."""
        found = self.texts.get(method, {})
        texts = list(texts)
        return np.array([found[text] for text in texts]) if texts and all(text in found for text in texts) else None


def read(path: Path = PATH) -> Results:
    """The rows of a file."""
    results = Results()
    for row in rows_of(path):
        if row["bed"] == "texts" and "absd" in row:
            results.texts.setdefault(row["method"], {})[row["text"]] = tuple(row[name] for name in TEXT_FIGURES)
        elif row["bed"] == "needles":
            results.needles.setdefault(row["method"], {})[row["task"]] = (row["density"], row["right"], row["n"])
    return results


def rows_of(path: Path) -> list[dict[str, Any]]:
    """Rows that hold a measurement."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return [row for row in rows if row["bed"] in ("texts", "needles") and "error" not in row]


def add(files: Iterable[Path], path: Path = PATH) -> int:
    """Put the rows of a run's files into `path`, rounded; a row of the same method and text or task is replaced."""
    every = rows_of(path) if path.exists() else []
    every += [row for file in files for row in rows_of(file)]
    merged = {(row["method"], row.get("text", row.get("task"))): row for row in every}
    lines = []
    for row in merged.values():
        kept = {name: row[name] for name in _KEPT if name in row}
        rounded = {name: round(value, _DIGITS) if isinstance(value, float) else value for name, value in kept.items()}
        lines.append(json.dumps(rounded))
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return len(lines)
