"""Mask functions, most of them one per file. Importing this package fills the table of methods."""

from __future__ import annotations

from typing import Any

from flexmask.block_masks.flash_prefill import flash_prefill_mask
from flexmask.block_masks.flexprefill import flexprefill_mask
from flexmask.block_masks.hip import hip_mask
from flexmask.block_masks.hybrid import hybrid_mask
from flexmask.block_masks.infllm import infllm_mask
from flexmask.block_masks.minference import minference_mask
from flexmask.block_masks.oracle import oracle_mask
from flexmask.block_masks.positions import causal_mask, lm_infinite_mask, moa_mask, streaming_llm_mask, tri_shape_mask
from flexmask.block_masks.published import published_mask
from flexmask.block_masks.sparge import sparge_mask
from flexmask.block_masks.vertical_slash import vertical_slash_mask
from flexmask.block_masks.xattention import xattention_mask
from flexmask.method import METHODS as METHODS

# by name, whatever file they stand in
for _name in sorted(METHODS):
    METHODS[_name] = METHODS.pop(_name)

__all__ = [
    "causal_mask",
    "flash_prefill_mask",
    "flexprefill_mask",
    "hip_mask",
    "hybrid_mask",
    "infllm_mask",
    "lm_infinite_mask",
    "minference_mask",
    "moa_mask",
    "oracle_mask",
    "published_mask",
    "sparge_mask",
    "streaming_llm_mask",
    "tri_shape_mask",
    "vertical_slash_mask",
    "xattention_mask",
]


def __getattr__(name: str) -> Any:
    raise AttributeError(f"flexmask.block_masks has no {name!r}; it has {', '.join(__all__)}")
