"""The shares that hybrid selection keeps, from its one knob gamma."""

from __future__ import annotations

from torch import Tensor


def slash_share(gamma: Tensor) -> Tensor:
    """Share of the slash mass of the representative rows that is kept; gamma itself is the share of the row evidence."""
    return gamma * 0.625
