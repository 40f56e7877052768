"""Structured prompts calibrated to a density: mask after mask, search for the amount of structure that gives it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from bench.prompts.structured import Tensors, structured_prompt
from flexmask import FlexPrefillConfig, FlexPrefillStats, flexprefill_mask
from flexmask.flex.head_groups import mask_bytes
from flexmask.mask import MOST_BYTES

TOLERANCE = 0.02
_CLOSE_ENOUGH = 0.008
_MOST_CALLS = 6


@dataclass(frozen=True)
class Calibrated:
    """A calibrated prompt and how it was found.

    Attributes
    ----------
    tensors
        query, key and value.
    aim
        The density passed to `structured_prompt`.
    density, query_aware
        Measured: mean density over the heads, and share of query-aware heads.
    calls
        Masks made during the search; 0 where `aim` was given.
    """

    tensors: Tensors
    aim: float
    density: float
    query_aware: float
    calls: int


def landed(density: float, named: float) -> bool:
    """Return whether a measured density is within `TOLERANCE` of its name."""
    return abs(density - named) <= TOLERANCE


def measured_density(query: Tensor, key: Tensor, gamma: float, **options: Any) -> tuple[float, float]:
    """Return the mean density and the share of query-aware heads of one call.

    Where the masks of all heads together would take too much memory, each key-value head's group is measured by itself.
    """
    needed = query.shape[:2].numel() * mask_bytes(query.shape[2], key.shape[2], FlexPrefillConfig(gamma, **options))
    groups = [(query, key)] if needed <= MOST_BYTES else zip(query.chunk(key.shape[1], 1), key.split(1, 1), strict=True)
    found = []
    with torch.no_grad():
        for q, k in groups:
            _, stats = cast(tuple[BlockMask, FlexPrefillStats], flexprefill_mask(q, k, gamma, return_stats=True, **options))
            found.append(torch.stack([stats.density.mean(), stats.is_query_aware.float().mean()]))
    density, query_aware = torch.stack(found).mean(0).tolist()
    return density, query_aware


def calibrated_prompt(
    length: int,
    density: float,
    *,
    gamma: float = 0.9,
    min_budget: int = 1024,
    block_size: int = 128,
    aim: float | None = None,
    log: Callable[[str], None] = lambda line: None,
    **shape: Any,
) -> Calibrated:
    """Search for a structured prompt on which a call keeps `density` of the visible blocks, to within `TOLERANCE` if possible.

    The search makes at most six masks. Density grows with the aim, so the search brackets the wanted density, then interpolates.
    The floor (`min_budget`) and the blocks that every head keeps set a lower bound on what can be reached.

    Parameters
    ----------
    length, density
        Tokens; the wanted density.
    gamma, min_budget, block_size
        Options of the calls.
    aim
        Result of an earlier search with the same arguments, used as it is.
    log
        Receives one line per mask.
    shape
        Heads, recipes, seed, device and dtype, as in `structured_prompt`.
    """

    def trial(value: float, calls: int) -> Calibrated:
        tensors = structured_prompt(length, value, block_size=block_size, **shape)
        found = measured_density(*tensors[:2], gamma, min_budget=min_budget, block_size=block_size)
        return Calibrated(tensors, value, *found, calls)

    if aim is not None:
        return trial(aim, 0)

    next_aim, below, above = density, None, None
    best: Calibrated | None = None
    for calls in range(1, _MOST_CALLS + 1):
        found = trial(next_aim, calls)
        log(f"  aim {found.aim:.4f}: density {found.density:.4f}, {found.query_aware:.0%} of the heads query-aware")
        if best is None or abs(found.density - density) < abs(best.density - density):
            best = found
        if abs(found.density - density) <= _CLOSE_ENOUGH:
            break
        if found.density < density:
            below = (found.aim, found.density)
        else:
            above = (found.aim, found.density)
        next_aim = _next_aim(found, density, below, above)
    assert best is not None
    return replace(best, calls=calls)


def _next_aim(last: Calibrated, density: float, below: tuple[float, float] | None, above: tuple[float, float] | None) -> float:
    """Scale in proportion until the density is bracketed, then interpolate, staying off the ends."""
    if below is None or above is None:
        return last.aim * min(3.0, max(0.3, density / last.density))
    share = (density - below[1]) / (above[1] - below[1])
    low, high = math.log(below[0]), math.log(above[0])
    return math.exp(low + (high - low) * min(0.85, max(0.15, share)))
