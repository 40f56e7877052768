"""The measured rows, and curves of error by density."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from bench.fidelity.settings import ALL
from bench.intervals import density_at, over_files

FOLDER = Path(__file__).parents[1] / "results"
NAMES = {
    "hybrid": "hybrid (ours)",
    "flexprefill": "flexprefill (the paper's)",
    "published": "published (the authors' code)",
}
ERROR = r"\|Δ log p\|"  # escaped: a table's cell
_SAME = ["device", "torch", "part", "input", "tokens", "what", "method", "wanted", "backend", "measure"]


def read(kind: str, folder: Path = FOLDER) -> pd.DataFrame:
    """Rows of all files ``<kind>-*.csv``, those that were measured again left out."""
    found = pd.concat([pd.read_csv(file) for file in sorted(folder.glob(f"{kind}-*.csv"))], ignore_index=True)
    found = found.assign(options=found["options"].fillna("{}"))
    return newest(found) if "date" in found else found


def newest(rows: pd.DataFrame) -> pd.DataFrame:
    """Rows without those that were measured again on a later date.

    The same measurement is one of the same density aimed for or, where none was, of the same options and density.
    """
    free = rows["wanted"].isna()
    options = rows["options"].where(free, rows["options"].str.contains("block_size").astype(str))
    keys = [*(rows[name] for name in _SAME), options, rows["density"].round(3).where(free)]
    return rows[rows["date"] == rows["date"].groupby(keys, dropna=False).transform("max")]


def usual(rows: pd.DataFrame) -> pd.DataFrame:
    """Rows of dense attention, and of settings that set exactly the options in `bench.fidelity.settings.ALL`."""
    knobs = {method: set(settings[0]) for method, settings in ALL.items()} | {"dense": set()}
    kept = [
        set(json.loads(options)) == knobs.get(method) for method, options in zip(rows["method"], rows["options"], strict=True)
    ]
    return rows[pd.Series(kept, index=rows.index, dtype=bool)]


def shown(rows: pd.DataFrame) -> list[str]:
    """Methods with rows, in the order of `NAMES`, then the others."""
    measured = set(rows["method"]) - {"dense", "causal"}
    return [*(name for name in NAMES if name in measured), *sorted(measured - set(NAMES))]


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

    def density_at(self, method: str, error: float) -> float:
        """Density at which a method reaches an error, interpolated in the same way; NaN out of range."""
        found = self.settings(method)
        return density_at(error, found[:, 0], found[:, 1]) if len(found) > 1 else float("nan")


def number(value: float, digits: int = 2) -> str:
    """A figure; a dash for NaN."""
    return "-" if np.isnan(value) else f"{value:.{digits}f}"


def percent(value: float, digits: int = 1) -> str:
    """A share; a dash for NaN."""
    return "-" if np.isnan(value) else f"{value:.{digits}%}"


def interval(low: float, high: float, form: str = ".2f") -> str:
    """An interval in brackets, after a space; nothing for NaN."""
    return f" [{low:{form}}, {high:{form}}]" if np.isfinite(low) else ""
