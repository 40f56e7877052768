"""Triton kernel for block means: reads each token once and skips heads that are not needed."""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from flexmask.base.blocks import BlockProblem
from flexmask.base.visibility import num_blocks
from flexmask.kernels.launch import kernel, next_power_of_2

# bits of a float32 that the dtype has too
_HIGH_BITS = {torch.bfloat16: -(1 << 16), torch.float16: -(1 << 13)}


@kernel
def _means_kernel(
    tokens,  # (batch, heads, length, head_dim)
    mask,  # (batch, kv_len) bool, read if HAS_ATTENTION_MASK
    representative,  # read for the offset
    wanted,  # (batch, heads) bool, read if HAS_WANTED
    means,  # (batch, heads, num_blocks, head_dim) float32; if SPLIT as `split_key_means` returns them
    stride_batch, stride_head, stride_token, stride_dim, heads, length, q_len, kv_len, blocks,
    HEAD_DIM: tl.constexpr, PADDED_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr,
    HAS_ATTENTION_MASK: tl.constexpr, OF_ROWS: tl.constexpr, HAS_WANTED: tl.constexpr, SPLIT: tl.constexpr,
    HIGH_BITS: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)
    is_wanted = True
    if HAS_WANTED:
        is_wanted = tl.load(wanted + head) != 0
    if is_wanted:
        o_dim = tl.arange(0, PADDED_DIM)
        b_total = tl.zeros([PADDED_DIM], tl.float32)
        p_tokens = tokens + (head // heads) * stride_batch + (head % heads) * stride_head
        batch = head // heads
        p_mask = mask + batch * kv_len
        offset = tl.load(representative + batch * (1 + BLOCK_SIZE))
        end = tl.minimum(length, offset + q_len)
        first = 0
        if OF_ROWS:
            end = length
            first = offset
        count = 0
        for start in tl.static_range(0, BLOCK_SIZE, TILE):
            o_token = block * BLOCK_SIZE + start + tl.arange(0, TILE)
            m_token = o_token < end
            if HAS_ATTENTION_MASK:
                m_token = m_token & (tl.load(p_mask + first + o_token, mask=m_token, other=0) != 0)
            b_x = tl.load(
                p_tokens + o_token[:, None].to(tl.int64) * stride_token + o_dim[None, :].to(tl.int64) * stride_dim,
                mask=m_token[:, None] & (o_dim[None, :] < HEAD_DIM),
                other=0.0,
            )
            b_total += tl.sum(b_x.to(tl.float32), 0)
            count += tl.sum(m_token.to(tl.int32), 0)
        b_total = b_total / tl.maximum(count, 1).to(tl.float32)
        MEAN_PARTS: tl.constexpr = 2 if SPLIT else 1
        p_mean = means + (head * blocks + block) * MEAN_PARTS * HEAD_DIM + o_dim
        if SPLIT:
            b_high = (b_total.to(tl.int32, bitcast=True) & HIGH_BITS).to(tl.float32, bitcast=True)
            tl.store(p_mean + HEAD_DIM, (b_total - b_high).to(means.dtype.element_ty), mask=o_dim < HEAD_DIM)
            b_total = b_high
        tl.store(p_mean, b_total.to(means.dtype.element_ty), mask=o_dim < HEAD_DIM)


def query_means(problem: BlockProblem, wanted: Tensor) -> Tensor:
    """Means of the valid rows of query blocks, (batch, num_heads, num_q_blocks, head_dim) float32, written in `wanted` heads."""
    return _means(problem, problem.inputs.query, wanted)


def key_means(problem: BlockProblem) -> Tensor:
    """As `flexmask.plain.key_means`."""
    return _means(problem, problem.inputs.key)


def split_key_means(problem: BlockProblem) -> Tensor:
    """`key_means` in key's dtype, (.., num_kv_blocks, parts, head_dim): in half precision high and low parts, else one."""
    key = problem.inputs.key
    return key_means(problem).unsqueeze(-2) if key.dtype == torch.float32 else _means(problem, key, split=True)


def _means(problem: BlockProblem, x: Tensor, wanted: Tensor | None = None, split: bool = False) -> Tensor:
    inputs, block_size, representative = problem.inputs, problem.block_size, problem.kernel_geometry.representative
    batch, heads, length, head_dim = x.shape
    blocks, mask = num_blocks(length, block_size), inputs.attention_mask
    shape = (batch, heads, blocks, 2, head_dim) if split else (batch, heads, blocks, head_dim)
    means = x.new_empty(shape, dtype=x.dtype if split else torch.float32)
    _means_kernel[(blocks, batch * heads)](
        x, representative if mask is None else mask, representative, means if wanted is None else wanted, means, *x.stride(),
        heads, length, inputs.query.shape[2], inputs.key.shape[2], blocks,
        HEAD_DIM=head_dim, PADDED_DIM=max(16, next_power_of_2(head_dim)), BLOCK_SIZE=block_size,
        TILE=min(32, block_size & -block_size), HAS_ATTENTION_MASK=mask is not None, OF_ROWS=x is inputs.query,
        HAS_WANTED=wanted is not None, SPLIT=split, HIGH_BITS=_HIGH_BITS.get(x.dtype, -1), num_warps=1,
    )  # fmt: skip
    return means
