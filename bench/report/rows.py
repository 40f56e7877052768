"""The measured rows, and curves of error by density."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from bench.fidelity.settings import ALL
from bench.intervals import over_files

FOLDER = Path(__file__).parents[1] / "results"
# hybrid from before its thresholds followed the length
FIRST_RULE = "hybrid, first rule"
NAMES = {
    "hybrid": "hybrid",
    FIRST_RULE: FIRST_RULE,
    "flexprefill": "flexprefill (the paper's)",
    "published": "published (the authors' code)",
    "xattention": "xattention",
    "flash_prefill": "flash_prefill",
    "streaming_llm": "streaming_llm",
}


def read(kind: str, folder: Path = FOLDER) -> pd.DataFrame:
    """Rows of all files ``<kind>-*.csv``."""
    files = sorted(folder.glob(f"{kind}-*.csv"))
    if not files:
        return pd.DataFrame(columns=["method", "options"])
    found = pd.concat([pd.read_csv(file) for file in files], ignore_index=True)
    return found.assign(options=found["options"].fillna("{}"))


def usual(rows: pd.DataFrame) -> pd.DataFrame:
    """Rows of dense attention, and of settings that set exactly the options in `bench.fidelity.settings.ALL`."""
    knobs = {method: set(settings[0]) for method, settings in ALL.items()} | {FIRST_RULE: {"gamma"}, "dense": set()}
    kept = [
        set(json.loads(options)) == knobs.get(method) for method, options in zip(rows["method"], rows["options"], strict=True)
    ]
    return rows[pd.Series(kept, index=rows.index, dtype=bool)]


def shown(rows: pd.DataFrame, most: int = 5) -> list[str]:
    """Methods of the main tables that have rows; hybrid's first rule if there are none of hybrid."""
    measured = set(rows["method"])
    return [name for name in NAMES if name in measured and not (name == FIRST_RULE and "hybrid" in measured)][:most]


class Curves:
    """Error by density of every method on the same texts.

    `rows` are of one model and length, with the columns text, method, options, density and `error`.
    """

    def __init__(self, rows: pd.DataFrame, error: str) -> None:
        self.figures = ["density", error]
        by = rows.pivot_table(index=["method", "options"], columns="text", values=self.figures)
        enough = by["density"].notna().sum(axis=1)
        by = by[enough == enough.max()] if len(by) else by
        self.texts: Sequence[str] = list(by["density"].columns) if len(by) else []
        # by method, (figures, settings, texts)
        self._by = {
            method: np.stack([own[figure].to_numpy() for figure in self.figures])
            for method, own in by.dropna(axis=0).groupby(level="method")
        }

    def settings(self, method: str, weights: np.ndarray | None = None) -> np.ndarray:
        """(settings, 2): density and error by rising density, mean over texts."""
        if method not in self._by:
            return np.empty((0, 2))
        weights = np.full(len(self.texts), 1 / len(self.texts)) if weights is None else weights
        found = (self._by[method] @ weights).T
        return found[found[:, 0].argsort()]

    def error_at(self, method: str, density: float, weights: np.ndarray | None = None) -> float:
        """Error at a density, its logarithm interpolated linearly; NaN out of range."""
        found = self.settings(method, weights)
        if len(found) < 2 or not found[0, 0] <= density <= found[-1, 0]:
            return float("nan")
        return float(np.exp(np.interp(density, found[:, 0], np.log(np.maximum(found[:, 1], 1e-9)))))

    def interval_at(self, method: str, density: float) -> tuple[float, float]:
        """95% interval of `error_at` over files."""
        return over_files(self.texts, lambda weights: self.error_at(method, density, weights))


def number(value: float, digits: int = 2) -> str:
    """A figure; a dash for NaN."""
    return "-" if np.isnan(value) else f"{value:.{digits}f}"
