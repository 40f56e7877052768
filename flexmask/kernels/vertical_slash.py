"""Triton kernels from the block sums of the representative attention to V and S: each row's softmax, then sums over the rows."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from flexmask.base.representative_rows import RepresentativeRows
from flexmask.kernels.representative import BLOCKS_PER_PROGRAM, BlockSums

_LINES_PER_PROGRAM = 8


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
    LARGEST: tl.constexpr,
):
    head = tl.program_id(1).to(tl.int64)
    batch = tl.program_id(1) // num_heads
    line = tl.program_id(0) * TILE + tl.arange(0, TILE)[:, None]
    slot = tl.arange(0, PADDED_SIZE)
    exists = slot < BLOCK_SIZE
    row_base = tl.load(base + head * BLOCK_SIZE + slot, mask=exists, other=0.0)[None, :]
    row_factor = tl.load(factor + head * BLOCK_SIZE + slot, mask=exists, other=0.0)[None, :]
    row = tl.load(rows + batch * rows_stride + 1 + slot, mask=exists, other=-1)
    num_rows = tl.maximum(tl.sum((row >= 0).to(tl.int32), 0), 1).to(tl.float32)
    # the sums of rows not taken are 0, whatever their block
    own = ((tl.load(rows + batch * rows_stride) + tl.maximum(row, 0)) // BLOCK_SIZE)[None, :]

    here = (line < num_kv_blocks) & exists[None, :]
    place = sums + ((head * num_kv_blocks + line) * BLOCK_SIZE + slot[None, :]) * 4
    weight = tl.exp2(tl.load(place, mask=here, other=float("-inf")) - row_base) * row_factor
    shares = tl.load(place + 1, mask=here, other=0.0) * weight
    if LARGEST:
        # NaN must not be lost in a maximum
        vertical = tl.where(tl.sum((shares != shares).to(tl.int32), 1) > 0, float("nan"), tl.max(shares, 1))
    else:
        vertical = tl.sum(shares, 1) / num_rows

    # key block own - line lies on the diagonal; part of the one after it and of the one before it counts for it too
    slash = tl.zeros([TILE, PADDED_SIZE], tl.float32)
    for shift in tl.static_range(-1, 2):
        block = own - line + shift
        on = (block >= 0) & (block < num_kv_blocks) & exists[None, :]
        place = sums + ((head * num_kv_blocks + block) * BLOCK_SIZE + slot[None, :]) * 4
        weight = tl.exp2(tl.load(place, mask=on, other=float("-inf")) - row_base) * row_factor
        if shift == 0:
            part = tl.load(place + 1, mask=on, other=0.0)
            part -= tl.load(place + 2, mask=on, other=0.0)
            part -= tl.load(place + 3, mask=on, other=0.0)
        elif shift == 1:
            part = tl.load(place + 2, mask=on, other=0.0)
        else:
            part = tl.load(place + 3, mask=on, other=0.0)
        slash += part * weight
    index = tl.program_id(0) * TILE + tl.arange(0, TILE)
    inside = index < num_kv_blocks
    out = lines + head * num_kv_blocks + index
    wanted = candidates + batch * candidates_stride_batch + index
    in_vertical = tl.load(wanted, mask=inside, other=0) != 0
    in_slash = tl.load(wanted + candidates_stride, mask=inside, other=0) != 0
    tl.store(out, tl.where(in_vertical, vertical, -1.0), mask=inside)
    # a difference: what rounding leaves of nothing may be negative
    total = tl.maximum(tl.sum(slash, 1), 0.0)
    tl.store(out + lines_stride, tl.where(in_slash, total / num_rows, -1.0), mask=inside)


def line_mass(sums: BlockSums, norms: RowNorms, rows: Tensor, candidates: Tensor, largest: bool = False) -> Tensor:
    """V by key block and S by block diagonal, (2, batch, num_heads, num_kv_blocks) float32 (see `flexmask.plain.vertical_slash`).

    `candidates` is (2, batch or 1, num_kv_blocks) int32: nonzero for key blocks and block diagonals that some row sees; others
    get -1. With `largest`, V is not the mean over the rows but the most that one of them gives to the key block.
    """
    batch, num_heads, blocks, block_size, _ = sums.blocks.shape
    lines = sums.blocks.new_empty((2, batch, num_heads, blocks))
    _lines_kernel[(triton.cdiv(blocks, _LINES_PER_PROGRAM), batch * num_heads)](
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
        TILE=_LINES_PER_PROGRAM,
        LARGEST=largest,
    )
    return lines


def kept_mass(keep: Tensor, rows: RepresentativeRows, sums: BlockSums, norms: RowNorms, block_size: int) -> Tensor:
    """Attention of the representative rows that the kept blocks hold, summed over the rows, (batch, num_heads) float32.

    `keep` is (batch, num_heads, num_q_blocks, num_kv_blocks) bool.
    """
    q_block = (rows.row // block_size)[:, None, :, None].expand(*keep.shape[:2], -1, keep.shape[3])
    by_row = torch.exp2(sums.blocks[..., 0] - norms.base.unsqueeze(-2)) * sums.blocks[..., 1] * norms.factor.unsqueeze(-2)
    return torch.where(keep.gather(2, q_block), by_row.mT, 0.0).sum((-2, -1))
