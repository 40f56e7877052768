"""Triton kernel for the lines that hybrid selection keeps of the representative rows."""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from flexmask.base.blocks import BlockProblem
from flexmask.kernels.block_lists import MOST_BLOCKS
from flexmask.kernels.launch import cdiv, kernel, next_power_of_2
from flexmask.kernels.pattern import Lines
from flexmask.kernels.vertical_slash import (
    LINES_PER_PROGRAM,
    RepresentativeMass,
    diagonal_sums,
    key_block_shares,
    load_rows,
)


@kernel
def _line_kernel(
    sums,
    base,
    factor,
    rows,
    keys,
    thresholds,  # (2, batch or 1, num_heads)
    kept,  # int8; the key blocks are read where OF_DIAGONALS
    rows_stride,
    keys_stride,
    keys_stride_batch,
    thresholds_stride,
    thresholds_stride_batch,
    kept_stride,
    num_heads,
    num_kv_blocks,
    near,
    OF_DIAGONALS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    PADDED_SIZE: tl.constexpr,
    TILE: tl.constexpr,
):
    head = tl.program_id(1).to(tl.int64)
    batch = tl.program_id(1) // num_heads
    o_line = tl.program_id(0) * TILE + tl.arange(0, TILE)
    p_threshold = thresholds + batch * thresholds_stride_batch + head % num_heads
    p_candidates = keys + 3 * keys_stride + batch * keys_stride_batch + o_line
    if OF_DIAGONALS:
        p_threshold += thresholds_stride
        p_candidates += keys_stride
    threshold = tl.load(p_threshold).to(tl.float32)
    b_base, b_factor, b_own, num_rows = load_rows(base, factor, rows, head, batch, rows_stride, BLOCK_SIZE, PADDED_SIZE)
    if OF_DIAGONALS:
        b_total = diagonal_sums(
            sums, kept, b_base, b_factor, b_own, head, o_line[:, None], near, num_kv_blocks, BLOCK_SIZE, PADDED_SIZE,
            LEAVES_OUT=True,
        )  # fmt: skip
        b_share = b_total / num_rows
    else:
        b_shares = key_block_shares(sums, b_base, b_factor, head, o_line[:, None], num_kv_blocks, BLOCK_SIZE, PADDED_SIZE)
        # NaN must not be lost in a maximum
        b_share = tl.where(tl.sum((b_shares != b_shares).to(tl.int32), 1) > 0, float("nan"), tl.max(b_shares, 1))
    m_line = o_line < num_kv_blocks
    m_candidate = tl.load(p_candidates, mask=m_line, other=0) != 0
    p_kept = kept + head * num_kv_blocks + o_line
    if OF_DIAGONALS:
        p_kept += kept_stride
    # NaN drops nothing
    tl.store(p_kept, (((b_share < threshold) == 0) & m_candidate).to(tl.int8), mask=m_line)


def last_rows_lines(problem: BlockProblem, last: RepresentativeMass, thresholds: Tensor, near: int) -> Lines:
    """As `flexmask.plain.last_rows.last_rows_lines`."""
    batch, num_heads, blocks, block_size, _ = last.sums.blocks.shape
    edges, shared = problem.edges, thresholds.shape[1] == 1
    _, keys_stride, _, keys_stride_batch = edges.strides
    kept = last.sums.blocks.new_empty((2, batch, num_heads, blocks), dtype=torch.int8)
    for family in range(2):
        _line_kernel[(cdiv(blocks, LINES_PER_PROGRAM), batch * num_heads)](
            last.sums.blocks, last.norms.base, last.norms.factor, last.rows, edges.keys, thresholds, kept,
            1 + block_size if last.rows.shape[0] > 1 else 0, keys_stride, keys_stride_batch, thresholds.shape[1] * num_heads,
            0 if shared else num_heads, batch * num_heads * blocks, num_heads, blocks, min(near, MOST_BLOCKS),
            OF_DIAGONALS=family == 1, BLOCK_SIZE=block_size, PADDED_SIZE=next_power_of_2(block_size),
            TILE=LINES_PER_PROGRAM,
        )  # fmt: skip
    return Lines(kept)
