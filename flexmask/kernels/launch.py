"""Kernels as they are launched: one compilation serves all lengths."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import triton

# numbers that follow the lengths; strides of query and key are compiled in by their divisibility, which wide loads need
_NUMBERS = (
    "q_len", "kv_len", "num_heads", "num_kv_heads", "heads", "num_q_blocks", "num_kv_blocks", "blocks", "length", "num_chunks",
    "max_distance", "window", "near", "nearest", "nearest_of_last", "cap", "floor", "digit_pass", "rows_stride", "keys_stride",
    "rows_stride_batch", "keys_stride_batch", "thresholds_stride", "thresholds_stride_batch",
    "last_rows_stride", "kept_stride", "lines_stride",
)  # fmt: skip


def kernel(function: Callable[..., Any]) -> Any:
    """A Triton kernel that is not compiled again for other lengths."""
    return triton.jit(function, do_not_specialize=list(_NUMBERS))
