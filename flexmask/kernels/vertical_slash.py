"""Triton kernels from the block sums of the representative attention to V and S: each row's softmax, then sums over the rows."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from flexmask.base.blocks import BlockProblem
from flexmask.base.representative_rows import RepresentativeRows, representative_rows
from flexmask.kernels.representative import BLOCKS_PER_PROGRAM, BlockSums, block_sums, packed_rows

LINES_PER_PROGRAM = 8


class RowNorms(NamedTuple):
    """A row's softmax is ``exp2(score - base) * factor``; both (batch, num_heads, block_size) float32."""

    base: Tensor
    factor: Tensor  # 0 for rows not taken


@triton.jit
def _row_norms_kernel(chunks, base, factor, num_chunks, ROWS: tl.constexpr, TILE: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    head = tl.program_id(1).to(tl.int64)
    slot = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    highest = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    for start in range(0, num_chunks, TILE):
        chunk = start + tl.arange(0, TILE)
        place = chunks + ((head * num_chunks + chunk[:, None]) * BLOCK_SIZE + slot[None, :]) * 2
        exists = (chunk < num_chunks)[:, None]
        peaks = tl.load(place, mask=exists, other=float("-inf"))
        higher = tl.maximum(highest, tl.max(peaks, 0))
        finite = tl.where(higher == float("-inf"), 0.0, higher)
        weight = tl.exp2(peaks - finite[None, :])
        total = total * tl.exp2(highest - finite) + tl.sum(tl.load(place + 1, mask=exists, other=0.0) * weight, 0)
        highest = higher
    place = head * BLOCK_SIZE + slot
    tl.store(base + place, tl.where(highest == float("-inf"), 0.0, highest))
    tl.store(factor + place, tl.where(total == 0, 0.0, 1.0 / tl.where(total == 0, 1.0, total)))


def row_norms(sums: BlockSums) -> RowNorms:
    """The softmax of every representative row."""
    batch, num_heads, blocks, block_size, _ = sums.blocks.shape
    num_chunks = triton.cdiv(blocks, BLOCKS_PER_PROGRAM)
    base, factor = (sums.chunks.new_empty((batch, num_heads, block_size)) for _ in range(2))
    _row_norms_kernel[(block_size // 16, batch * num_heads)](
        sums.chunks, base, factor, num_chunks, ROWS=16, TILE=32, BLOCK_SIZE=block_size
    )
    return RowNorms(base, factor)


@triton.jit
def load_rows(base, factor, rows, head, batch, rows_stride, BLOCK_SIZE: tl.constexpr, PADDED_SIZE: tl.constexpr):
    """Of the representative rows the softmax's base and factor, their own key blocks, and their number; (1, PADDED_SIZE)."""
    slot = tl.arange(0, PADDED_SIZE)
    exists = slot < BLOCK_SIZE
    row_base = tl.load(base + head * BLOCK_SIZE + slot, mask=exists, other=0.0)[None, :]
    row_factor = tl.load(factor + head * BLOCK_SIZE + slot, mask=exists, other=0.0)[None, :]
    row = tl.load(rows + batch * rows_stride + 1 + slot, mask=exists, other=-1)
    num_rows = tl.maximum(tl.sum((row >= 0).to(tl.int32), 0), 1).to(tl.float32)
    # the sums of rows not taken are 0, whatever their block
    own = ((tl.load(rows + batch * rows_stride) + tl.maximum(row, 0)) // BLOCK_SIZE)[None, :]
    return row_base, row_factor, own, num_rows


@triton.jit
def key_block_shares(sums, row_base, row_factor, head, block, num_kv_blocks, BLOCK_SIZE: tl.constexpr, PADDED_SIZE: tl.constexpr):
    """What each row gives to key blocks (TILE, 1), (TILE, PADDED_SIZE)."""
    slot = tl.arange(0, PADDED_SIZE)[None, :]
    mask = (block < num_kv_blocks) & (slot < BLOCK_SIZE)
    ptrs = sums + ((head * num_kv_blocks + block) * BLOCK_SIZE + slot) * 4
    weight = tl.exp2(tl.load(ptrs, mask=mask, other=float("-inf")) - row_base) * row_factor
    return tl.load(ptrs + 1, mask=mask, other=0.0) * weight


@triton.jit
def diagonal_sums(
    sums,
    held,  # (batch, num_heads, num_kv_blocks) int8: key blocks whose attention does not count, read if LEAVES_OUT
    row_base,
    row_factor,
    own,
    head,
    diagonal,  # (TILE, 1)
    near,  # of a row's nearest so many key blocks all attention counts
    num_kv_blocks,
    BLOCK_SIZE: tl.constexpr,
    PADDED_SIZE: tl.constexpr,
    LEAVES_OUT: tl.constexpr,
):
    """What all rows give to block diagonals, (TILE,).

    Key block own - diagonal lies on the diagonal; part of the one after it and of the one before it counts for it too.
    """
    slot = tl.arange(0, PADDED_SIZE)[None, :]
    shares = tl.zeros_like((own - diagonal).to(tl.float32))
    for shift in tl.static_range(-1, 2):
        block = own - diagonal + shift
        mask = (block >= 0) & (block < num_kv_blocks) & (slot < BLOCK_SIZE)
        if LEAVES_OUT:
            leaves_out = mask & (diagonal - shift >= near)
            mask = mask & (tl.load(held + head * num_kv_blocks + block, mask=leaves_out, other=0) == 0)
        ptrs = sums + ((head * num_kv_blocks + block) * BLOCK_SIZE + slot) * 4
        weight = tl.exp2(tl.load(ptrs, mask=mask, other=float("-inf")) - row_base) * row_factor
        if shift == 0:
            part = tl.load(ptrs + 1, mask=mask, other=0.0)
            part -= tl.load(ptrs + 2, mask=mask, other=0.0)
            part -= tl.load(ptrs + 3, mask=mask, other=0.0)
        elif shift == 1:
            part = tl.load(ptrs + 2, mask=mask, other=0.0)
        else:
            part = tl.load(ptrs + 3, mask=mask, other=0.0)
        shares += part * weight
    # a difference: what rounding leaves of nothing may be negative
    return tl.maximum(tl.sum(shares, 1), 0.0)


@triton.jit
def _lines_kernel(
    sums,
    base,
    factor,
    rows,  # (batch or 1, 1 + block_size) int32, from packed_rows
    candidates,  # (2, batch or 1, num_kv_blocks) int32
    lines,  # (2, batch, num_heads, num_kv_blocks) float32
    rows_stride,
    candidates_stride,
    candidates_stride_batch,
    num_heads,
    num_kv_blocks,
    lines_stride,
    BLOCK_SIZE: tl.constexpr,
    PADDED_SIZE: tl.constexpr,
    TILE: tl.constexpr,
):
    head = tl.program_id(1).to(tl.int64)
    batch = tl.program_id(1) // num_heads
    line = tl.program_id(0) * TILE + tl.arange(0, TILE)
    row_base, row_factor, own, num_rows = load_rows(base, factor, rows, head, batch, rows_stride, BLOCK_SIZE, PADDED_SIZE)
    shares = key_block_shares(sums, row_base, row_factor, head, line[:, None], num_kv_blocks, BLOCK_SIZE, PADDED_SIZE)
    vertical = tl.sum(shares, 1) / num_rows
    slash = diagonal_sums(
        sums, candidates, row_base, row_factor, own, head, line[:, None], 0, num_kv_blocks, BLOCK_SIZE, PADDED_SIZE,
        LEAVES_OUT=False,
    )  # fmt: skip
    mask = line < num_kv_blocks
    ptrs = candidates + batch * candidates_stride_batch + line
    in_vertical = tl.load(ptrs, mask=mask, other=0) != 0
    in_slash = tl.load(ptrs + candidates_stride, mask=mask, other=0) != 0
    ptrs = lines + head * num_kv_blocks + line
    tl.store(ptrs, tl.where(in_vertical, vertical, -1.0), mask=mask)
    tl.store(ptrs + lines_stride, tl.where(in_slash, slash / num_rows, -1.0), mask=mask)


def line_mass(sums: BlockSums, norms: RowNorms, rows: Tensor, candidates: Tensor) -> Tensor:
    """V by key block and S by block diagonal, (2, batch, num_heads, num_kv_blocks) float32 (see `flexmask.plain.vertical_slash`).

    `candidates` is (2, batch or 1, num_kv_blocks) int32: nonzero for key blocks and block diagonals that some row sees; others
    get -1.
    """
    batch, num_heads, blocks, block_size, _ = sums.blocks.shape
    lines = sums.blocks.new_empty((2, batch, num_heads, blocks))
    _lines_kernel[(triton.cdiv(blocks, LINES_PER_PROGRAM), batch * num_heads)](
        sums.blocks,
        norms.base,
        norms.factor,
        rows,
        candidates,
        lines,
        1 + block_size if rows.shape[0] > 1 else 0,
        candidates.shape[1] * blocks,
        blocks if candidates.shape[1] > 1 else 0,
        num_heads,
        blocks,
        batch * num_heads * blocks,
        BLOCK_SIZE=block_size,
        PADDED_SIZE=triton.next_power_of_2(block_size),
        TILE=LINES_PER_PROGRAM,
    )
    return lines


class RepresentativeMass(NamedTuple):
    """The attention of the representative rows, and what it sums to."""

    rows: RepresentativeRows
    packed: Tensor  # the rows as kernels read them, of `packed_rows`
    sums: BlockSums
    norms: RowNorms


def representative_mass(problem: BlockProblem, which: str) -> RepresentativeMass:
    """Step 1: the attention of the "last" or the "middle" rows, summed by row and key block."""
    tokens = problem.tokens
    rows = representative_rows(which, tokens, problem.block_size)
    packed = packed_rows(rows, tokens.offset)
    sums = block_sums(problem.inputs, packed, tokens.key_valid if tokens.padded else None, problem.block_size)
    return RepresentativeMass(rows, packed, sums, row_norms(sums))


def coverage(problem: BlockProblem, mass: RepresentativeMass, keep: Tensor) -> Tensor:
    """True attention of the representative rows that the kept blocks of their query blocks hold, (batch, num_heads) float32."""
    rows, sums, norms = mass.rows, mass.sums, mass.norms
    q_block = (rows.row // problem.block_size)[:, None, :, None].expand(*keep.shape[:2], -1, keep.shape[3])
    by_row = torch.exp2(sums.blocks[..., 0] - norms.base.unsqueeze(-2)) * sums.blocks[..., 1] * norms.factor.unsqueeze(-2)
    held = torch.where(keep.gather(2, q_block), by_row.mT, 0.0).sum((-2, -1))
    return held / rows.taken.sum(-1).clamp(min=1)[:, None]
