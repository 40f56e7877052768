"""Triton kernel for the lines that hybrid selection keeps of the representative rows: the twin of `last_rows_lines`."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from flexmask.base import hybrid_rule
from flexmask.config import FlexPrefillConfig

_TILE = 32
# more blocks than there are: a floor of any size stays within int32
_MOST_BLOCKS = 2**30


class LastRowsLines(NamedTuple):
    """The lines of each head."""

    adds_blocks: Tensor  # (batch, num_heads) bool, True
    kept: Tensor  # (2, batch, num_heads, num_kv_blocks) int8: key blocks, block diagonals
    rows: Tensor  # (batch or 1, 1 + block_size) int32: the representative rows, from packed_rows
    nearest: int  # key blocks that the query blocks of these rows keep, the nearest


@triton.jit
def _last_rows_kernel(
    lines,  # (2, batch, num_heads, num_kv_blocks) float32: the largest share by key block, and S; -1: no candidate
    gamma,  # (num_heads,) float64
    kept,  # (2, batch, num_heads, num_kv_blocks) int8
    adds_blocks,  # (batch, num_heads) bool
    lines_stride,  # between the families
    num_heads,
    num_kv_blocks,
    floor,
    KEY_BLOCK: tl.constexpr,
    DIAGONAL: tl.constexpr,
    TILE: tl.constexpr,
):
    head = tl.program_id(1).to(tl.int64)
    row = head * num_kv_blocks
    line = tl.program_id(0) * TILE + tl.arange(0, TILE)
    inside = line < num_kv_blocks
    dropped = 1.0 - tl.load(gamma + head % num_heads)
    # the same from every program of a head
    tl.store(adds_blocks + head, True)

    # places in descending order, equal ones by lower index; NaN counts as 0, and drops nothing below
    largest = tl.load(lines + row + line, mask=inside, other=-1.0)
    own = tl.where(largest == largest, largest, 0.0)
    rank = tl.zeros([TILE], tl.int32)
    for start in range(0, num_kv_blocks, TILE):
        rival = start + tl.arange(0, TILE)
        value = tl.load(lines + row + rival, mask=rival < num_kv_blocks, other=-1.0)
        value = tl.where(value == value, value, 0.0)
        equal_before = (value[None, :] == own[:, None]) & (rival[None, :] < line[:, None])
        rank += tl.sum(((value[None, :] > own[:, None]) | equal_before).to(tl.int32), 1)
    keep = ((largest < (KEY_BLOCK * dropped).to(tl.float32)) == 0) | (rank < floor)
    tl.store(kept + row + line, (keep & (largest != -1.0)).to(tl.int8), mask=inside)

    mean = tl.load(lines + lines_stride + row + line, mask=inside, other=-1.0)
    keep = ((mean < (DIAGONAL * dropped).to(tl.float32)) == 0) | (line < floor)
    tl.store(kept + lines_stride + row + line, (keep & (mean != -1.0)).to(tl.int8), mask=inside)


def last_rows_lines(lines: Tensor, rows: Tensor, gamma: Tensor, config: FlexPrefillConfig) -> LastRowsLines:
    """Key blocks and block diagonals that the representative rows keep; every head adds blocks of its own rows.

    Parameters
    ----------
    lines
        (2, batch, num_heads, num_kv_blocks) float32: by key block the most that one row gives to it, by block diagonal S; -1
        where no row sees a line.
    rows
        (batch or 1, 1 + block_size) int32, from `packed_rows`: handed on.
    gamma
        (num_heads,) float64.
    config
        The floor, half of which each family takes, and a multiple the query blocks of the rows.
    """
    _, batch, num_heads, blocks = lines.shape
    adds_blocks = lines.new_empty((batch, num_heads), dtype=torch.bool)
    kept = lines.new_empty(lines.shape, dtype=torch.int8)
    _last_rows_kernel[(triton.cdiv(blocks, _TILE), batch * num_heads)](
        lines,
        gamma,
        kept,
        adds_blocks,
        batch * num_heads * blocks,
        num_heads,
        blocks,
        config.half_of_min_blocks,
        KEY_BLOCK=hybrid_rule.KEY_BLOCK,
        DIAGONAL=hybrid_rule.DIAGONAL,
        TILE=_TILE,
    )
    return LastRowsLines(adds_blocks, kept, rows, min(hybrid_rule.NEAREST * config.min_blocks, _MOST_BLOCKS))
