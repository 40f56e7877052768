"""Triton kernel for the lines that hybrid selection keeps of the representative rows: the twin of `last_rows_lines`."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from flexmask.base import hybrid_rule
from flexmask.config import FlexPrefillConfig
from flexmask.kernels.top_p import keep_top_p


class LastRowsLines(NamedTuple):
    """The lines of each head."""

    adds_blocks: Tensor  # (batch, num_heads) bool, True
    kept: Tensor  # (2, batch, num_heads, num_kv_blocks) int8: key blocks, block diagonals
    number: Tensor  # (2, batch, num_heads) int64: how many of either


@triton.jit
def _last_rows_kernel(
    lines,  # (2, batch, num_heads, num_kv_blocks) float32: the largest share by key block, and S; -1: no candidate
    gamma,  # (num_heads,) float64
    kept,  # (2, batch, num_heads, num_kv_blocks) int8
    count,  # (2, batch, num_heads) int64
    adds_blocks,  # (batch, num_heads) bool
    heads,  # batch * num_heads
    num_heads,
    num_kv_blocks,
    floor,
    KEY_BLOCK: tl.constexpr,
    DIAGONAL: tl.constexpr,
    TILE: tl.constexpr,
):
    family = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    row = (family * heads + head) * num_kv_blocks
    dropped = 1.0 - tl.load(gamma + head % num_heads)
    if family == 0:
        threshold = (KEY_BLOCK * dropped).to(tl.float32)
        tl.store(adds_blocks + head, True)
        keep_top_p(lines + row, kept + row, num_kv_blocks, tl.full([], -1.0, tl.float64), floor, floor, TILE=TILE)
        # what other threads of the program wrote is read below
        tl.debug_barrier()
    else:
        threshold = (DIAGONAL * dropped).to(tl.float32)
    number = tl.zeros([TILE], tl.int32)
    for start in range(0, num_kv_blocks, TILE):
        line = start + tl.arange(0, TILE)
        inside = line < num_kv_blocks
        share = tl.load(lines + row + line, mask=inside, other=-1.0)
        # NaN drops nothing
        keep = (share < threshold) == 0
        if family == 0:
            keep = keep | (tl.load(kept + row + line, mask=inside, other=0) != 0)
        else:
            keep = keep | (line < floor)
        keep = keep & (share != -1.0)
        tl.store(kept + row + line, keep.to(tl.int8), mask=inside)
        number += keep.to(tl.int32)
    tl.store(count + family * heads + head, tl.sum(number, 0).to(tl.int64))


def last_rows_lines(lines: Tensor, gamma: Tensor, config: FlexPrefillConfig) -> LastRowsLines:
    """Key blocks and block diagonals that the representative rows keep; every head adds blocks of its own rows.

    Parameters
    ----------
    lines
        (2, batch, num_heads, num_kv_blocks) float32: by key block the most that one row gives to it, by block diagonal S; -1
        where no row sees a line.
    gamma
        (num_heads,) float64.
    config
        The floor, half of which each family takes.
    """
    _, batch, num_heads, blocks = lines.shape
    adds_blocks = lines.new_empty((batch, num_heads), dtype=torch.bool)
    kept = lines.new_empty(lines.shape, dtype=torch.int8)
    count = lines.new_empty((2, batch, num_heads), dtype=torch.int64)
    _last_rows_kernel[(2, batch * num_heads)](
        lines,
        gamma,
        kept,
        count,
        adds_blocks,
        batch * num_heads,
        num_heads,
        blocks,
        config.half_of_min_blocks,
        KEY_BLOCK=hybrid_rule.KEY_BLOCK,
        DIAGONAL=hybrid_rule.DIAGONAL,
        TILE=64,
        num_warps=8,
    )
    return LastRowsLines(adds_blocks, kept, count)
