"""Mask generators: query and key in, BlockMask out, one method a file."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from flexmask.block_masks.causal import causal_mask as causal_mask
from flexmask.block_masks.flexprefill import flexprefill_mask as flexprefill_mask

MASKS: dict[str, Callable[..., Any]] = {
    "causal": causal_mask,
    "flexprefill": flexprefill_mask,
}

__all__ = ["MASKS", "causal_mask", "flexprefill_mask"]
