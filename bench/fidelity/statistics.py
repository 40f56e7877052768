"""Intervals over texts, shares of right answers, and the density at which a method's error reaches a value."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import numpy as np

DRAWS = 10_000
_Z = 1.959964


def file_of(text: str) -> str:
    """The file that a text is a piece of: pieces of one book are no independent texts."""
    return text.rpartition("-")[0]


def bootstrap_weights(texts: Sequence[str], draws: int = DRAWS, seed: int = 0) -> np.ndarray:
    """Weights of means over texts, (1 + draws, texts): all alike in the first row, files drawn with replacement in the others."""
    return _bootstrap_weights(tuple(texts), draws, seed)


@functools.cache
def _bootstrap_weights(texts: tuple[str, ...], draws: int, seed: int) -> np.ndarray:
    files = sorted({file_of(text) for text in texts})
    member = np.array([[file_of(text) == file for text in texts] for file in files], dtype=float)
    counts = np.random.default_rng(seed).multinomial(len(files), [1 / len(files)] * len(files), size=draws)
    weights = np.concatenate([np.ones((1, len(texts))), counts @ member])
    return np.asarray(weights / weights.sum(1, keepdims=True))


def interval(draws: np.ndarray) -> tuple[float, float]:
    """95% interval of the draws, which may be infinite."""
    ordered = np.sort(draws)
    last = len(ordered) - 1
    return float(ordered[math.floor(0.025 * last)]), float(ordered[math.ceil(0.975 * last)])


def ratio(column: np.ndarray, base: np.ndarray) -> tuple[float, float]:
    """95% interval of ``column / base``, whose draws may be infinite: past what was measured."""
    with np.errstate(invalid="ignore", divide="ignore"):
        draws = np.where(np.isfinite(base), column / base, -np.sign(base) * np.inf)
    unknown = ~np.isfinite(column) & ~np.isfinite(base)
    return interval(np.where(unknown, -np.inf, draws))[0], interval(np.where(unknown, np.inf, draws))[1]


def wilson(right: float, n: int) -> tuple[float, float]:
    """95% interval of a share (Wilson's)."""
    share, z2 = right / n, _Z * _Z
    centre = (share + z2 / (2 * n)) / (1 + z2 / n)
    half = _Z / (1 + z2 / n) * math.sqrt(share * (1 - share) / n + z2 / (4 * n * n))
    return max(0.0, centre - half), min(1.0, centre + half)


def error_at(target: np.ndarray, density: np.ndarray, error: np.ndarray, log: bool = True) -> np.ndarray:
    """A method's error at a density, between neighbouring settings linear in the error, or in its logarithm.

    Parameters
    ----------
    target
        (draws,): densities.
    density, error
        (settings, draws): what was measured, settings by rising density.
    log
        Interpolate the logarithm; the error must be > 0.

    Returns
    -------
    ndarray
        (draws,); NaN where the settings do not reach the density from both sides.
    """
    if len(density) < 2:
        return np.full(target.shape, np.nan)
    draw = np.arange(density.shape[1])
    high = np.clip((density < target).sum(0), 1, len(density) - 1)
    low = high - 1
    values = np.log(np.maximum(error, 1e-9)) if log else error
    span = density[high, draw] - density[low, draw]
    share = np.divide(target - density[low, draw], span, out=np.zeros_like(span), where=span > 0)
    found = values[low, draw] + share * (values[high, draw] - values[low, draw])
    inside = (target >= density[0]) & (target <= density[-1])
    found = np.where(inside, found, np.nan)
    return np.exp(found) if log else found


def known_interval(draws: np.ndarray) -> tuple[float, float]:
    """95% interval of draws of which few are NaN; infinite if more than one in twenty is."""
    known = draws[~np.isnan(draws)]
    return interval(known) if len(known) >= 0.95 * len(draws) else (-math.inf, math.inf)


def density_at(target: float, density: np.ndarray, error: np.ndarray) -> np.ndarray:
    """Density at which a method's error falls to `target`, linear in the error's logarithm between neighbouring settings.

    Parameters
    ----------
    target
        Error, > 0.
    density, error
        (settings, draws): what was measured, settings by rising density.

    Returns
    -------
    ndarray
        (draws,); -inf where every setting has less error, inf where every setting has more.
    """
    reached = error <= target
    first = reached.argmax(0)
    draw = np.arange(density.shape[1])
    low = np.maximum(first - 1, 0)
    # an error that is not positive has no logarithm; the setting before it has reached the target almost
    logs = np.log(np.maximum(error, 1e-9))
    span = logs[low, draw] - logs[first, draw]
    share = np.divide(logs[low, draw] - math.log(target), span, out=np.zeros_like(span), where=span > 0)
    found = density[low, draw] + share * (density[first, draw] - density[low, draw])
    return np.where(~reached.any(0), np.inf, np.where(first == 0, -np.inf, found))
