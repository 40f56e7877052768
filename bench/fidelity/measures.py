"""What methods are compared by: errors on texts and of heads' outputs, each with its density, and draws of their means."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bench.fidelity import statistics
from bench.fidelity.results import Results
from bench.measure.rows import read_rows as rows_of_files

Rows = dict[str, dict[str, dict[str, Any]]]
"""Rows of a file by method and text"""


@dataclass(frozen=True)
class Measure:
    """One kind of error of every method on the same texts.

    Attributes
    ----------
    name
        The column's title.
    texts
        Names of the texts.
    figures
        By setting (texts, 2): density and error.
    ratio
        True if errors are > 0 and compared by their ratio; else by their difference.
    """

    name: str
    texts: Sequence[str]
    figures: dict[str, np.ndarray]
    ratio: bool = True

    def draws(self, settings: Iterable[str], weights: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
        """Density and error of those settings that were measured, (settings, 1 + draws) each, every draw by rising density."""
        weights = statistics.bootstrap_weights(self.texts) if weights is None else weights
        found = [weights @ self.figures[name] for name in settings if name in self.figures]
        if not found:
            return np.empty((0, len(weights))), np.empty((0, len(weights)))
        density, error = np.moveaxis(np.stack(found), -1, 0)
        # each draw by its own densities, whose order need not be that of the means
        order = density.argsort(0, kind="stable")
        return np.take_along_axis(density, order, 0), np.take_along_axis(error, order, 0)


def of_texts(results: Results, texts: Sequence[str]) -> list[Measure]:
    """Change of a token's log-probability, and of the loss."""
    known = {name: found for name in results.texts if (found := results.on(name, texts)) is not None}
    return [
        Measure("abs d", texts, {name: each[:, [0, 2]] for name, each in known.items()}),
        Measure("change of loss", texts, {name: each[:, [0, 1]] for name, each in known.items()}, ratio=False),
    ]


def of_attention(rows: Rows) -> list[Measure]:
    """Error of heads' outputs, and the attention that they lose; on the texts that all methods were measured on."""
    texts = common_texts(rows)
    if not texts:
        return []
    rows = {name: by for name, by in rows.items() if set(texts) <= set(by)}
    output = {name: np.array([[by[text]["density"], by[text]["output_error"]] for text in texts]) for name, by in rows.items()}
    lost = {
        name: np.array([[by[text]["density"], max(1e-6, 1 - by[text]["mass"])] for text in texts]) for name, by in rows.items()
    }
    return [Measure("output error", texts, output), Measure("attention lost", texts, lost)]


def common_texts(rows: Rows) -> list[str]:
    """Texts that every method was measured on, methods left out that lack more than half of the most."""
    most = max((len(by) for by in rows.values()), default=0)
    kept = [by for by in rows.values() if len(by) > most / 2]
    return sorted(set.intersection(*(set(by) for by in kept))) if kept else []


def read_rows(paths: Path | Sequence[Path], bed: str, item: str = "text") -> Rows:
    """Rows of a bed by method and text or task; none of files that are not there."""
    found: Rows = {}
    for row in rows_of_files(path for path in ([paths] if isinstance(paths, Path) else paths) if path.exists()):
        if row["bed"] == bed and item in row and "error" not in row:
            found.setdefault(row["method"], {})[row[item]] = row
    return found
