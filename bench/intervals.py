"""95% intervals of means."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

DRAWS = 2000


def of_mean(values: Sequence[float], seed: int = 0) -> tuple[float, float]:
    """Interval of a mean, by a bootstrap over the values."""
    found = np.asarray(values, dtype=float)
    draws = np.random.default_rng(seed).integers(len(found), size=(DRAWS, len(found)))
    low, high = np.percentile(found[draws].mean(1), [2.5, 97.5])
    return float(low), float(high)


def over_files(texts: Sequence[str], figure: Callable[[np.ndarray], float], seed: int = 0) -> tuple[float, float]:
    """Interval of a figure of weighted texts, by a bootstrap over files, since pieces of one book are not independent.

    `figure` takes the weights of the texts, which sum to 1, and may return NaN.
    """
    files = sorted({text.rpartition("-")[0] or text for text in texts})
    member = np.array([[(text.rpartition("-")[0] or text) == file for text in texts] for file in files], dtype=float)
    counts = np.random.default_rng(seed).multinomial(len(files), [1 / len(files)] * len(files), size=DRAWS // 4)
    weights = counts @ member
    found = np.array([figure(each / each.sum()) for each in weights])
    known = found[~np.isnan(found)]
    if len(known) < 0.95 * len(found):
        return math.nan, math.nan
    low, high = np.percentile(known, [2.5, 97.5])
    return float(low), float(high)
