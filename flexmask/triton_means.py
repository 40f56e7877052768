"""Triton kernel for block means: each token read once, heads that are not wanted not at all."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from flexmask.visibility import num_blocks


@triton.jit
def _means_kernel(
    tokens,  # (batch, heads, length, head_dim), any strides
    valid,  # (batch or 1, length) bool as int8, contiguous
    wanted,  # (batch, heads) bool as int8, contiguous
    means,  # (batch, heads, num_blocks, head_dim) float32
    stride_batch,
    stride_head,
    stride_token,
    stride_dim,
    valid_stride_batch,
    heads,
    length,
    blocks,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
):
    block = tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)
    dims = tl.arange(0, PADDED_DIM)
    total = tl.zeros([PADDED_DIM], tl.float32)
    if tl.load(wanted + head) != 0:
        base = tokens + (head // heads) * stride_batch + (head % heads) * stride_head
        valid_row = valid + (head // heads) * valid_stride_batch
        count = 0
        for start in tl.static_range(0, BLOCK_SIZE, TILE):
            token = block * BLOCK_SIZE + start + tl.arange(0, TILE)
            present = tl.load(valid_row + token, mask=token < length, other=0) != 0
            x = tl.load(
                base + token[:, None].to(tl.int64) * stride_token + dims[None, :] * stride_dim,
                mask=present[:, None] & (dims[None, :] < HEAD_DIM),
                other=0.0,
            )
            total += tl.sum(x.to(tl.float32), 0)
            count += tl.sum(present.to(tl.int32), 0)
        total = total / tl.maximum(count, 1).to(tl.float32)
    tl.store(means + (head * blocks + block) * HEAD_DIM + dims, total, mask=dims < HEAD_DIM)


def launch_means(x: Tensor, valid: Tensor, wanted: Tensor, block_size: int) -> Tensor:
    """Run the kernel; see `means`."""
    batch, heads, length, head_dim = x.shape
    blocks = num_blocks(length, block_size)
    result = torch.empty((batch, heads, blocks, head_dim), dtype=torch.float32, device=x.device)
    _means_kernel[(blocks, batch * heads)](
        x,
        valid.contiguous().view(torch.int8),
        wanted.contiguous().view(torch.int8),
        result,
        *x.stride(),
        length if valid.shape[0] > 1 else 0,
        heads,
        length,
        blocks,
        HEAD_DIM=head_dim,
        PADDED_DIM=triton.next_power_of_2(head_dim),
        BLOCK_SIZE=block_size,
        TILE=min(64, block_size & -block_size),
    )
    return result


@torch.library.custom_op("flexmask::means", mutates_args=())
def means(x: Tensor, valid: Tensor, wanted: Tensor, block_size: int) -> Tensor:
    """Mean of every block's valid tokens in float32, zero where there are none or the head is not wanted.

    Parameters
    ----------
    x
        (batch, heads, length, head_dim).
    valid
        (batch or 1, length) bool.
    wanted
        (batch, heads) bool.
    block_size
        Tokens in a block.
    """
    return launch_means(x, valid, wanted, block_size)


@means.register_fake
def _(x, valid, wanted, block_size):
    batch, heads, length, head_dim = x.shape
    return x.new_empty((batch, heads, num_blocks(length, block_size), head_dim), dtype=torch.float32)
