"""Mask generators: query and key in, BlockMask out, one method a file."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from flexmask.block_masks.causal import causal_mask as causal_mask
from flexmask.block_masks.flash_prefill import flash_prefill_mask as flash_prefill_mask
from flexmask.block_masks.flexprefill import flexprefill_mask as flexprefill_mask
from flexmask.block_masks.hip import hip_mask as hip_mask
from flexmask.block_masks.infllm import infllm_mask as infllm_mask
from flexmask.block_masks.lm_infinite import lm_infinite_mask as lm_infinite_mask
from flexmask.block_masks.minference import minference_mask as minference_mask
from flexmask.block_masks.moa import moa_mask as moa_mask
from flexmask.block_masks.oracle import oracle_mask as oracle_mask
from flexmask.block_masks.sparge import sparge_mask as sparge_mask
from flexmask.block_masks.streaming_llm import streaming_llm_mask as streaming_llm_mask
from flexmask.block_masks.tri_shape import tri_shape_mask as tri_shape_mask
from flexmask.block_masks.vertical_slash import vertical_slash_mask as vertical_slash_mask
from flexmask.block_masks.xattention import xattention_mask as xattention_mask

MASKS: dict[str, Callable[..., Any]] = {
    "causal": causal_mask,
    "flash_prefill": flash_prefill_mask,
    "flexprefill": flexprefill_mask,
    "hip": hip_mask,
    "infllm": infllm_mask,
    "lm_infinite": lm_infinite_mask,
    "minference": minference_mask,
    "moa": moa_mask,
    "oracle": oracle_mask,
    "sparge": sparge_mask,
    "streaming_llm": streaming_llm_mask,
    "tri_shape": tri_shape_mask,
    "vertical_slash": vertical_slash_mask,
    "xattention": xattention_mask,
}

__all__ = [
    "MASKS",
    "causal_mask",
    "flash_prefill_mask",
    "flexprefill_mask",
    "hip_mask",
    "infllm_mask",
    "lm_infinite_mask",
    "minference_mask",
    "moa_mask",
    "oracle_mask",
    "sparge_mask",
    "streaming_llm_mask",
    "tri_shape_mask",
    "vertical_slash_mask",
    "xattention_mask",
]
