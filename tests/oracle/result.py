"""The oracle's result: one head's mask, decision and margins, and all heads as tensors."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tests.oracle.steps import by_block
from tests.oracle.visibility import Block, Visibility


@dataclass(frozen=True)
class ReferenceResult:
    """Decisions for every head with their margins, on the CPU; numbers are float64, counts int64.

    Unless noted a field is per head, ``(batch, num_heads)``. Margins are relative and ``inf`` where nothing was decided.
    """

    keep: Tensor  # (batch, num_heads, num_q_blocks, num_kv_blocks) bool
    full: Tensor  # as keep: kept, and every existing pair is visible
    is_query_aware: Tensor
    js_distance: Tensor  # D_JS, in [0, sqrt(ln 2)] or NaN
    vertical: Tensor  # (batch, num_heads, num_kv_blocks): V; in hybrid selection the most that one row gives
    slash: Tensor  # (batch, num_heads, num_kv_blocks): S; in hybrid selection without what kept key blocks hold
    pooled: Tensor  # A, shape of keep
    row_evidence: Tensor  # R of hybrid selection, shape of keep
    num_vertical_blocks: Tensor  # without the blocks that are always kept
    num_slash_blocks: Tensor
    density: Tensor  # kept blocks / visible blocks, 0 if none is visible
    coverage: Tensor  # attention of the index rows in kept blocks
    row_coverage: Tensor  # row evidence in kept blocks, mean over query blocks; NaN if not computed
    least_row_coverage: Tensor  # the least of them
    pattern_margin: Tensor
    vertical_margin: Tensor
    slash_margin: Tensor
    query_aware_margin: Tensor  # whether the head uses the map or not
    row_margin: Tensor
    margin: Tensor  # the smallest of those that the mask depends on


class Mask(NamedTuple):
    """One head's kept blocks and their statistics."""

    keep: Tensor  # (num_q_blocks, num_kv_blocks) bool
    full: Tensor  # (num_q_blocks, num_kv_blocks) bool
    density: float
    coverage: float


class Decision(NamedTuple):
    """One head's pattern and the quantities behind it."""

    is_query_aware: bool
    js_distance: float
    vertical: Tensor  # (num_kv_blocks,)
    slash: Tensor  # (num_kv_blocks,)
    pooled: Tensor  # (num_q_blocks, num_kv_blocks)
    row_evidence: Tensor  # (num_q_blocks, num_kv_blocks)
    row_coverage: float
    num_vertical_blocks: int
    num_slash_blocks: int
    least_row_coverage: float = math.nan


class Margins(NamedTuple):
    """One head's margins."""

    pattern_margin: float
    vertical_margin: float
    slash_margin: float
    query_aware_margin: float
    row_margin: float
    margin: float


class Head(NamedTuple):
    """All of one head."""

    mask: Mask
    decision: Decision
    margins: Margins


def head_mask(kept: set[Block], attention: Tensor, rows: list[int], seen: Visibility) -> Mask:
    """Block maps, density and coverage of the kept blocks; `attention` is that of the index rows."""
    keep, full = _empty_map(seen), _empty_map(seen)
    for r, j in kept:
        keep[r, j] = True
    for r, j in kept.intersection(seen.full_blocks):
        full[r, j] = True
    covered = 0.0
    for row_attention, row in zip(attention, rows, strict=True):
        per_block = by_block(row_attention, seen.block_size)
        covered += float(per_block[keep[row // seen.block_size]].sum())
    return Mask(keep, full, len(kept) / len(seen.visible_blocks), covered / len(rows))


def empty_head(seen: Visibility, row_coverage: float) -> Head:
    """A head of a batch row without valid query rows."""
    mask = Mask(_empty_map(seen), _empty_map(seen), 0.0, 0.0)
    lines = torch.zeros(seen.num_kv_blocks, dtype=torch.float64)
    decision = Decision(False, 0.0, lines, lines, no_map(seen), no_map(seen), row_coverage, 0, 0, row_coverage)
    return Head(mask, decision, Margins(*[math.inf] * 6))


def no_map(seen: Visibility) -> Tensor:
    """Zeros for a quantity that a selection does not compute."""
    return _empty_map(seen).double()


def _empty_map(seen: Visibility) -> Tensor:
    return torch.zeros(seen.num_q_blocks, seen.num_kv_blocks, dtype=torch.bool)


def stacked(heads: list[Head], batch: int) -> ReferenceResult:
    """All heads of all batch rows; `heads` is ordered by batch row."""
    named = [{**head.mask._asdict(), **head.decision._asdict(), **head.margins._asdict()} for head in heads]
    columns = {field.name: _column([head[field.name] for head in named]) for field in fields(ReferenceResult)}
    return ReferenceResult(**{name: column.unflatten(0, (batch, -1)) for name, column in columns.items()})


def _column(values: list[Any]) -> Tensor:
    """One field of every head."""
    if isinstance(values[0], Tensor):
        return torch.stack(values)
    return torch.tensor(values, dtype=torch.float64 if isinstance(values[0], float) else None)
