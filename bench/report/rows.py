"""The measured rows, and curves of error by density."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pandas as pd

from bench.fidelity.settings import ALL
from bench.intervals import over_files

FOLDER = Path(__file__).parents[1] / "results"
NAMES = {
    "hybrid": "hybrid (ours)",
    "flexprefill": "flexprefill (the paper's rule)",
    "published": "published (the authors' code)",
}
ERROR = r"\|Δ log p\|"  # escaped: a table's cell


def read(kind: str, folder: Path = FOLDER) -> pd.DataFrame:
    """Rows of all files ``<kind>-*.csv``; hybrid's say that they had no floor if they are older than it."""
    found = pd.concat(
        [pd.read_csv(file, dtype={"each": str}) for file in sorted(folder.glob(f"{kind}-*.csv"))], ignore_index=True
    )
    options = found["options"].fillna("{}")
    before_floor = (found["method"] == "hybrid") & ~options.str.contains("min_coverage")
    return found.assign(options=options.mask(before_floor, options.map(_without_floor)))


def _without_floor(options: str) -> str:
    return json.dumps({**json.loads(options), "min_coverage": 0.0}, sort_keys=True)


def usual(rows: pd.DataFrame) -> pd.DataFrame:
    """Rows of dense attention, and of settings that set exactly the options in `bench.fidelity.settings.ALL`."""
    knobs = {method: set(settings[0]) for method, settings in ALL.items()} | {"dense": set()}
    kept = [
        set(json.loads(options)) == knobs.get(method) for method, options in zip(rows["method"], rows["options"], strict=True)
    ]
    return rows[kept]


class Curves:
    """|Δ log p| by density of every method on the same texts; `rows` are of one model and length."""

    def __init__(self, rows: pd.DataFrame) -> None:
        by = rows.pivot_table(index=["method", "options"], columns="text", values=["density", "abs_d"])
        enough = by["density"].notna().sum(axis=1)
        by = by[enough == enough.max()].dropna()
        self.texts = list(by["density"].columns)
        # by method, (figures, settings, texts)
        self._by = {
            method: np.stack([own["density"], own["abs_d"]]) for method, own in by.groupby(level="method") if len(own) > 1
        }

    def settings(self, method: str, weights: np.ndarray | None = None) -> np.ndarray:
        """(2, settings): density and error by rising density, mean over texts; none with fewer than two settings."""
        if method not in self._by:
            return np.full((2, 1), np.nan)
        weights = np.full(len(self.texts), 1 / len(self.texts)) if weights is None else weights
        found = self._by[method] @ weights
        return found[:, found[0].argsort()]

    def error_at(self, method: str, density: float, weights: np.ndarray | None = None) -> float:
        """Error at a density, its logarithm interpolated linearly; NaN out of range."""
        densities, errors = self.settings(method, weights)
        return float(np.exp(np.interp(density, densities, np.log(errors), np.nan, np.nan)))

    def interval_at(self, method: str, density: float) -> tuple[float, float]:
        """95% interval of `error_at` over files."""
        return over_files(self.texts, lambda weights: self.error_at(method, density, weights))

    def density_at(self, method: str, error: float) -> float:
        """Density at which a method's falling error reaches `error`, interpolated in the same way; NaN out of range."""
        densities, errors = self.settings(method)[:, ::-1]
        return float(np.interp(np.log(error), np.log(errors), densities, np.nan, np.nan))


def number(value: float) -> str:
    """A figure; a dash for NaN."""
    return "-" if np.isnan(value) else f"{value:.2f}"


def percent(value: float, digits: int = 1) -> str:
    """A share; a dash for NaN."""
    return "-" if np.isnan(value) else f"{value:.{digits}%}"


def interval(low: float, high: float, form: str = ".2f") -> str:
    """An interval in brackets, after a space; nothing for NaN."""
    return f" [{low:{form}}, {high:{form}}]" if np.isfinite(low) else ""
