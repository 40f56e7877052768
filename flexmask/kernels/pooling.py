"""Triton kernel for block means: reads each token once and skips heads that are not needed."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from flexmask.base.blocks import BlockProblem
from flexmask.base.visibility import num_blocks

# bits of a float32 that the dtype has too
_FIRST_DIGITS = {torch.bfloat16: -(1 << 16), torch.float16: -(1 << 13)}


@triton.jit
def _means_kernel(
    tokens,  # (batch, heads, length, head_dim)
    valid,  # (batch or 1, length) int8, read if HAS_VALID
    wanted,  # (batch, heads) bool, read if HAS_WANTED
    means,  # (batch, heads, num_blocks, head_dim) float32; if SPLIT as `split_means` returns them
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
    HAS_VALID: tl.constexpr,
    HAS_WANTED: tl.constexpr,
    SPLIT: tl.constexpr,
    FIRST_DIGITS: tl.constexpr,
):
    block = tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)
    is_wanted = True
    if HAS_WANTED:
        is_wanted = tl.load(wanted + head) != 0
    if is_wanted:
        o_dim = tl.arange(0, PADDED_DIM)
        b_total = tl.zeros([PADDED_DIM], tl.float32)
        p_tokens = tokens + (head // heads) * stride_batch + (head % heads) * stride_head
        p_valid = valid + (head // heads) * valid_stride_batch
        count = 0
        for start in tl.static_range(0, BLOCK_SIZE, TILE):
            o_token = block * BLOCK_SIZE + start + tl.arange(0, TILE)
            m_token = o_token < length
            if HAS_VALID:
                m_token = tl.load(p_valid + o_token, mask=m_token, other=0) != 0
            b_x = tl.load(
                p_tokens + o_token[:, None].to(tl.int64) * stride_token + o_dim[None, :].to(tl.int64) * stride_dim,
                mask=m_token[:, None] & (o_dim[None, :] < HEAD_DIM),
                other=0.0,
            )
            b_total += tl.sum(b_x.to(tl.float32), 0)
            count += tl.sum(m_token.to(tl.int32), 0)
        b_total = b_total / tl.maximum(count, 1).to(tl.float32)
        HALVES: tl.constexpr = 2 if SPLIT else 1
        p_mean = means + (head * blocks + block) * HALVES * HEAD_DIM + o_dim
        if SPLIT:
            b_high = (b_total.to(tl.int32, bitcast=True) & FIRST_DIGITS).to(tl.float32, bitcast=True)
            tl.store(p_mean + HEAD_DIM, (b_total - b_high).to(means.dtype.element_ty), mask=o_dim < HEAD_DIM)
            b_total = b_high
        tl.store(p_mean, b_total.to(means.dtype.element_ty), mask=o_dim < HEAD_DIM)


def block_means(x: Tensor, valid: Tensor | None, wanted: Tensor | None, block_size: int) -> Tensor:
    """As `flexmask.plain.pooling.block_means`; `wanted` is (batch, heads) bool, the other heads stay unwritten. None: all."""
    batch, heads, length, head_dim = x.shape
    means = x.new_empty((batch, heads, num_blocks(length, block_size), head_dim), dtype=torch.float32)
    _launch(x, valid, wanted, means, block_size)
    return means


def key_means(problem: BlockProblem) -> Tensor:
    """As `flexmask.plain.pooling.key_means`."""
    tokens = problem.tokens
    return block_means(problem.inputs.key, None if tokens.filled else tokens.key_valid, None, problem.block_size)


def split_means(x: Tensor, valid: Tensor | None, block_size: int) -> Tensor:
    """Block means whose halves add up, (batch, heads, num_blocks, halves, head_dim) in x's dtype.

    In half precision the first digits and the rest; in float32 one half.
    """
    if x.dtype == torch.float32:
        return block_means(x, valid, None, block_size).unsqueeze(-2)
    batch, heads, length, head_dim = x.shape
    means = x.new_empty((batch, heads, num_blocks(length, block_size), 2, head_dim))
    _launch(x, valid, None, means, block_size)
    return means


def _launch(x: Tensor, valid: Tensor | None, wanted: Tensor | None, means: Tensor, block_size: int) -> None:
    batch, heads, length, head_dim = x.shape
    blocks = means.shape[2]
    _means_kernel[(blocks, batch * heads)](
        x, means if valid is None else valid.to(torch.int8).contiguous(), means if wanted is None else wanted, means,
        *x.stride(), 0 if valid is None or valid.shape[0] == 1 else length, heads, length, blocks,
        HEAD_DIM=head_dim, PADDED_DIM=max(16, triton.next_power_of_2(head_dim)), BLOCK_SIZE=block_size,
        TILE=min(32, block_size & -block_size), HAS_VALID=valid is not None, HAS_WANTED=wanted is not None,
        SPLIT=means.dtype != torch.float32, FIRST_DIGITS=_FIRST_DIGITS.get(x.dtype, -1), num_warps=1,
    )  # fmt: skip
