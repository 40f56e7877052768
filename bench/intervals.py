"""95% intervals of shares and means, and densities at an error."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

DRAWS = 2000


def wilson(right: float, count: int, z: float = 1.96) -> tuple[float, float]:
    """Wilson's interval of a share.

    Example
    -------
    >>> [round(end, 3) for end in wilson(8, 10)]
    [0.49, 0.943]
    """
    share, extra = right / count, z * z / count
    middle = (share + extra / 2) / (1 + extra)
    half = z * math.sqrt(share * (1 - share) / count + extra / (4 * count)) / (1 + extra)
    return max(0.0, middle - half), min(1.0, middle + half)


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


def density_at(error: float, densities: np.ndarray, errors: np.ndarray) -> float:
    """Density at which a curve reaches an error, by linear interpolation of the error's logarithm; NaN out of range."""
    order = densities.argsort()
    errors, densities = np.log(np.maximum(errors[order], 1e-9)), densities[order]
    reached = errors <= math.log(error)
    first = int(reached.argmax())
    if not reached.any() or first == 0:
        return math.nan
    high, low = errors[first - 1], errors[first]
    share = (high - math.log(error)) / (high - low)
    return float(densities[first - 1] + share * (densities[first] - densities[first - 1]))
