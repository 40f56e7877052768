"""Triton kernel for the lines that hybrid selection keeps of the representative rows: the twin of `last_rows_lines`."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from flexmask.base.hybrid_rule import slash_share
from flexmask.config import FlexPrefillConfig
from flexmask.kernels.top_p import keep_top_p


class LastRowsLines(NamedTuple):
    """The lines of each head."""

    adds_blocks: Tensor  # (batch, num_heads) bool, True
    kept: Tensor  # (2, batch, num_heads, num_kv_blocks) int8: key blocks, block diagonals
    number: Tensor  # (2, batch, num_heads) int64: how many of either


@triton.jit
def _last_rows_kernel(
    lines,  # (2, batch, num_heads, num_kv_blocks) float32: V and S; -1: no candidate
    share,  # 0-d float64: of the slashes
    kept,  # (2, batch, num_heads, num_kv_blocks) int8
    count,  # (2, batch, num_heads) int64
    adds_blocks,  # (batch, num_heads) bool
    heads,  # batch * num_heads
    num_kv_blocks,
    cap,
    floor,
    TILE: tl.constexpr,
):
    family = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    row = (family * heads + head) * num_kv_blocks
    if family == 0:
        number = keep_top_p(lines + row, kept + row, num_kv_blocks, tl.full([], -1.0, tl.float64), cap, floor, TILE=TILE)
        tl.store(count + head, number.to(tl.int64))
        tl.store(adds_blocks + head, True)
    else:
        number = keep_top_p(lines + row, kept + row, num_kv_blocks, tl.load(share), cap, 0, TILE=TILE)
        # the window: what other threads of the program wrote is read here
        tl.debug_barrier()
        for start in range(0, tl.minimum(floor, num_kv_blocks), TILE):
            line = start + tl.arange(0, TILE)
            near = (line < floor) & (line < num_kv_blocks)
            near = near & (tl.load(lines + row + line, mask=near, other=-1.0) != -1.0)
            missing = near & (tl.load(kept + row + line, mask=near, other=1) == 0)
            tl.store(kept + row + line, tl.full([TILE], 1, tl.int8), mask=missing)
            number += tl.sum(missing.to(tl.int32), 0)
        tl.store(count + heads + head, number.to(tl.int64))


def last_rows_lines(lines: Tensor, gamma: Tensor, config: FlexPrefillConfig) -> LastRowsLines:
    """Key blocks and block diagonals that the representative rows keep; every head adds blocks of its own rows.

    `lines` is (2, batch, num_heads, num_kv_blocks) float32, V and S, -1 where no row sees a line; `gamma` 0-d float64.
    """
    _, batch, num_heads, blocks = lines.shape
    heads = batch * num_heads
    adds_blocks = lines.new_empty((batch, num_heads), dtype=torch.bool)
    kept = lines.new_empty(lines.shape, dtype=torch.int8)
    count = lines.new_empty((2, batch, num_heads), dtype=torch.int64)
    _last_rows_kernel[(2, heads)](
        lines,
        slash_share(gamma),
        kept,
        count,
        adds_blocks,
        heads,
        blocks,
        blocks + 1 if config.max_blocks is None else config.max_blocks,
        config.min_blocks,
        TILE=64,
        num_warps=8,
    )
    return LastRowsLines(adds_blocks, kept, count)
