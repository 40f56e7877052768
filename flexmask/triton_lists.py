"""Triton kernel for the index lists: one program a row of blocks, each entry of the lists written once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_TILE = 1024


@triton.jit
def _lists_kernel(
    keep,  # (batch, num_heads, num_q_blocks, num_kv_blocks) bool as int8, contiguous
    full,  # (batch or 1, num_q_blocks, num_kv_blocks) bool as int8, contiguous
    partial_count,  # (batch, num_heads, num_q_blocks) int32
    partial_indices,  # as keep, int32
    full_count,
    full_indices,
    full_stride_batch,
    num_heads,
    num_q_blocks,
    num_kv_blocks,
    TILE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    batch = row // (num_heads * num_q_blocks)
    keep_row = keep + row * num_kv_blocks
    full_row = full + batch * full_stride_batch + (row % num_q_blocks) * num_kv_blocks
    partial_row = partial_indices + row * num_kv_blocks
    whole_row = full_indices + row * num_kv_blocks
    num_partial = 0
    num_full = 0
    for start in range(0, num_kv_blocks, TILE):
        column = start + tl.arange(0, TILE)
        exists = column < num_kv_blocks
        kept = tl.load(keep_row + column, mask=exists, other=0) != 0
        whole = tl.load(full_row + column, mask=exists, other=0) != 0
        in_full = (kept & whole).to(tl.int32)
        in_partial = (kept & (whole == 0)).to(tl.int32)
        tl.store(whole_row + num_full + tl.cumsum(in_full, 0) - 1, column, mask=in_full != 0)
        tl.store(partial_row + num_partial + tl.cumsum(in_partial, 0) - 1, column, mask=in_partial != 0)
        num_full += tl.sum(in_full, 0)
        num_partial += tl.sum(in_partial, 0)
    for start in range(0, num_kv_blocks, TILE):
        column = start + tl.arange(0, TILE)
        exists = column < num_kv_blocks
        tl.store(whole_row + column, tl.zeros([TILE], tl.int32), mask=exists & (column >= num_full))
        tl.store(partial_row + column, tl.zeros([TILE], tl.int32), mask=exists & (column >= num_partial))
    tl.store(full_count + row, num_full)
    tl.store(partial_count + row, num_partial)


def launch_lists(keep: Tensor, full: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Run the kernel; see `lists`."""
    batch, num_heads, num_q_blocks, num_kv_blocks = keep.shape
    counts = [torch.empty(keep.shape[:3], dtype=torch.int32, device=keep.device) for _ in range(2)]
    indices = [torch.empty(keep.shape, dtype=torch.int32, device=keep.device) for _ in range(2)]
    _lists_kernel[(batch * num_heads * num_q_blocks,)](
        keep.contiguous().view(torch.int8),
        full.contiguous().view(torch.int8),
        counts[0],
        indices[0],
        counts[1],
        indices[1],
        num_q_blocks * num_kv_blocks if full.shape[0] > 1 else 0,
        num_heads,
        num_q_blocks,
        num_kv_blocks,
        TILE=min(_TILE, max(16, triton.next_power_of_2(num_kv_blocks))),
    )
    return counts[0], indices[0], counts[1], indices[1]


@torch.library.custom_op("flexmask::lists", mutates_args=())
def lists(keep: Tensor, full: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Counts and ascending indices of partial and of full blocks, entries past the count 0.

    Parameters
    ----------
    keep
        (batch, num_heads, num_q_blocks, num_kv_blocks) bool.
    full
        (batch or 1, num_q_blocks, num_kv_blocks) bool.
    """
    return launch_lists(keep, full)


@lists.register_fake
def _(keep, full):
    def new(shape):
        return keep.new_empty(shape, dtype=torch.int32)

    return new(keep.shape[:3]), new(keep.shape), new(keep.shape[:3]), new(keep.shape)
