"""Structured prompts that meet a wanted density: how much structure to ask for is found by making masks."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from bench.inputs import structured_prompt
from flexmask import FlexPrefillConfig, FlexPrefillStats, flexprefill_mask
from flexmask.flex.head_groups import mask_bytes
from flexmask.mask import MOST_BYTES

TOLERANCE = 0.02
_CLOSE_ENOUGH = 0.008
_MOST_CALLS = 6


@dataclass(frozen=True)
class Calibrated:
    """The prompt and how it was found.

    Attributes
    ----------
    tensors
        query, key and value.
    aim
        What `structured_prompt` was given as its density.
    density, query_aware
        Measured: mean density of the heads, and share of the heads that are query-aware.
    calls
        Masks made to find it; 0 where `aim` was known.
    """

    tensors: tuple[Tensor, Tensor, Tensor]
    aim: float
    density: float
    query_aware: float
    calls: int


def landed(density: float, named: float) -> bool:
    """Whether a measured density may be called by the name `named`."""
    return abs(density - named) <= TOLERANCE


def measured(query: Tensor, key: Tensor, gamma: float, **options: Any) -> tuple[float, float]:
    """Mean density and share of query-aware heads of one call; by the heads of a key head where all masks take too much."""
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
    """A structured prompt on which a call with `gamma` keeps `density` of the visible blocks, to within `TOLERANCE` if it can.

    Makes at most six masks. The density grows with the aim, so the aim is enclosed and then interpolated. What the floor
    (`min_budget`) and the blocks that are always kept come to is the least that can be reached.

    Parameters
    ----------
    length, density
        Tokens; the density wanted.
    gamma, min_budget, block_size
        Of the calls.
    aim
        Known from an earlier search with the same arguments: used as it is.
    log
        Gets a line per mask.
    shape
        As in `structured_prompt`: heads, recipes, seed, device, dtype.
    """

    def prompt(value: float) -> tuple[Tensor, Tensor, Tensor]:
        return structured_prompt(length, value, block_size=block_size, **shape)

    def measure(tensors: tuple[Tensor, Tensor, Tensor]) -> tuple[float, float]:
        return measured(*tensors[:2], gamma, min_budget=min_budget, block_size=block_size)

    if aim is not None:
        tensors = prompt(aim)
        return Calibrated(tensors, aim, *measure(tensors), calls=0)

    trial, below, above = density, None, None
    best: Calibrated | None = None
    for calls in range(1, _MOST_CALLS + 1):
        tensors = prompt(trial)
        found, query_aware = measure(tensors)
        log(f"  aim {trial:.4f}: density {found:.4f}, {query_aware:.0%} of the heads query-aware")
        if best is None or abs(found - density) < abs(best.density - density):
            best = Calibrated(tensors, trial, found, query_aware, calls)
        if abs(found - density) <= _CLOSE_ENOUGH:
            break
        if found < density:
            below = (trial, found)
        else:
            above = (trial, found)
        trial = _next_aim(trial, density / found, density, below, above)
    assert best is not None
    return Calibrated(best.tensors, best.aim, best.density, best.query_aware, calls)


def _next_aim(
    trial: float, factor: float, density: float, below: tuple[float, float] | None, above: tuple[float, float] | None
) -> float:
    """The next aim: by proportion until the density is enclosed, then by interpolation, kept off the ends."""
    if below is None or above is None:
        return trial * min(3.0, max(0.3, factor))
    share = (density - below[1]) / (above[1] - below[1])
    low, high = math.log(below[0]), math.log(above[0])
    return math.exp(low + (high - low) * min(0.85, max(0.15, share)))
