"""The oracle's result, of one head and of all."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tests.oracle.steps import by_block
from tests.oracle.visibility import Block, Visibility


class ReferenceResult(NamedTuple):
    """Decisions of one head with their margins, on the CPU; of all heads, each field has (batch, num_heads) before its shape.

    Numbers are float64, counts int64. The margin is relative, and ``inf`` where nothing was decided.
    """

    keep: Tensor  # (num_q_blocks, num_kv_blocks) bool
    full: Tensor  # as keep: kept, and every existing pair is visible
    vertical: Tensor  # (num_kv_blocks,): V; 0 in hybrid selection, as S
    slash: Tensor  # (num_kv_blocks,): S
    density: Any = 0.0  # kept blocks / visible blocks, 0 if none is visible
    coverage: Any = 0.0  # attention of the index rows in kept blocks
    is_query_aware: Any = False
    js_distance: Any = math.nan  # D_JS, in [0, sqrt(ln 2)] or NaN
    num_vertical_blocks: Any = 0  # without the blocks that are always kept
    num_slash_blocks: Any = 0
    row_coverage: Any = math.nan  # row evidence in kept blocks, mean over query blocks; NaN if not computed
    min_row_coverage: Any = math.nan  # the least of them
    margin: Any = math.inf  # the smallest of the decisions that the mask depends on


def undecided(seen: Visibility) -> ReferenceResult:
    """A head that keeps nothing and has decided nothing."""
    lines = torch.zeros(seen.num_kv_blocks, dtype=torch.float64)
    blocks = torch.zeros(seen.num_q_blocks, seen.num_kv_blocks, dtype=torch.bool)
    return ReferenceResult(blocks, blocks, lines, lines)


def head_mask(kept: set[Block], attention: Tensor, rows: list[int], seen: Visibility) -> ReferenceResult:
    """A head with its block maps, density and coverage; `attention` is that of the index rows."""
    head = undecided(seen)
    keep, full = head.keep.clone(), head.full.clone()
    for r, j in kept:
        keep[r, j] = True
    for r, j in kept.intersection(seen.full_blocks):
        full[r, j] = True
    covered = 0.0
    for row_attention, row in zip(attention, rows, strict=True):
        per_block = by_block(row_attention, seen.block_size)
        covered += float(per_block[keep[row // seen.block_size]].sum())
    return head._replace(keep=keep, full=full, density=len(kept) / len(seen.visible_blocks), coverage=covered / len(rows))


def stacked(heads: list[ReferenceResult], batch: int) -> ReferenceResult:
    """All heads of all batch rows; `heads` is ordered by batch row."""
    return ReferenceResult(*(_column(list(values)).unflatten(0, (batch, -1)) for values in zip(*heads, strict=True)))


def _column(values: list[Any]) -> Tensor:
    """One field of every head."""
    if isinstance(values[0], Tensor):
        return torch.stack(values)
    return torch.tensor(values, dtype=torch.float64 if isinstance(values[0], float) else None)
