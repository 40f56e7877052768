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
    """FlexPrefill's decisions for every head, and the margin of each. All tensors are on the CPU.

    "Per head" is shape ``(batch, num_heads)``; margins are relative and ``inf`` where nothing was decided.

    Attributes
    ----------
    keep : Tensor
        Bool ``(batch, num_heads, num_q_blocks, num_kv_blocks)``; True means the block is computed.
    full : Tensor
        Bool, as ``keep``; True means kept and every existing pair of the block is visible.
    is_query_aware : Tensor
        Bool per head; True means Query-Aware, False Vertical-Slash.
    js_distance : Tensor
        float64 per head, the paper's D_JS, in ``[0, sqrt(ln 2)]`` or NaN.
    vertical : Tensor
        float64 ``(batch, num_heads, num_kv_blocks)``: V, the attention mass of each key block; of hybrid selection
        the most that one row gives it.
    slash : Tensor
        float64 ``(batch, num_heads, num_kv_blocks)``: S, the attention mass of each block diagonal, 0 where the diagonal holds
        no visible block; of hybrid selection without what the kept key blocks hold.
    pooled : Tensor
        float64, shape of ``keep``: the pooled map A, the block-wise estimate for every query block.
    row_evidence : Tensor
        float64, shape of ``keep``: R, the attention of each query block's rows to the means of the key blocks; 0 where
        the method is not ``"hybrid"``.
    num_vertical_blocks, num_slash_blocks : Tensor
        int64 per head: selected key blocks and block diagonals; a Query-Aware head's are its floor. Blocks that are always kept
        are not counted.
    density : Tensor
        float64 per head: kept blocks / visible blocks (0 if none is visible).
    coverage : Tensor
        float64 per head: true attention mass of the index rows that lies in kept blocks.
    row_coverage : Tensor
        float64 per head: row evidence that lies in kept blocks, mean over the query blocks that have any; NaN without.
    pattern_margin : Tensor
        float64 per head: ``|js_distance - tau| / tau``.
    vertical_margin, slash_margin : Tensor
        float64 per head, of the selection made for the head: of the floor alone if Query-Aware.
    query_aware_margin : Tensor
        float64 per head, of the selection from ``pooled``, whether the head uses it or not.
    row_margin : Tensor
        float64 per head, of the selection from ``row_evidence``.
    margin : Tensor
        float64 per head: the smallest of the margins that its mask depends on.
    """

    keep: Tensor
    full: Tensor
    is_query_aware: Tensor
    js_distance: Tensor
    vertical: Tensor
    slash: Tensor
    pooled: Tensor
    row_evidence: Tensor
    num_vertical_blocks: Tensor
    num_slash_blocks: Tensor
    density: Tensor
    coverage: Tensor
    row_coverage: Tensor
    pattern_margin: Tensor
    vertical_margin: Tensor
    slash_margin: Tensor
    query_aware_margin: Tensor
    row_margin: Tensor
    margin: Tensor


class Mask(NamedTuple):
    """One head's kept blocks and their statistics."""

    keep: Tensor  # (num_q_blocks, num_kv_blocks) bool
    full: Tensor  # (num_q_blocks, num_kv_blocks) bool
    density: float
    coverage: float


class Decision(NamedTuple):
    """One head's pattern and the quantities it was selected from."""

    is_query_aware: bool
    js_distance: float
    vertical: Tensor  # (num_kv_blocks,)
    slash: Tensor  # (num_kv_blocks,)
    pooled: Tensor  # (num_q_blocks, num_kv_blocks)
    row_evidence: Tensor  # (num_q_blocks, num_kv_blocks)
    row_coverage: float
    num_vertical_blocks: int
    num_slash_blocks: int


class Margins(NamedTuple):
    """The relative distance of one head's decisions from going the other way."""

    pattern_margin: float
    vertical_margin: float
    slash_margin: float
    query_aware_margin: float
    row_margin: float
    margin: float


class Head(NamedTuple):
    """Everything the oracle says about one head."""

    mask: Mask
    decision: Decision
    margins: Margins


def head_mask(kept: set[Block], attention: Tensor, rows: list[int], seen: Visibility) -> Mask:
    """Block maps, density and coverage of the kept blocks; `attention` is that of the index rows, (len(rows), kv_len)."""
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


def empty_head(seen: Visibility) -> Head:
    """A head of a batch row without valid query rows: nothing to see, nothing to decide."""
    mask = Mask(_empty_map(seen), _empty_map(seen), 0.0, 0.0)
    lines = torch.zeros(seen.num_kv_blocks, dtype=torch.float64)
    decision = Decision(False, 0.0, lines, lines, no_map(seen), no_map(seen), math.nan, 0, 0)
    return Head(mask, decision, Margins(*[math.inf] * 6))


def no_map(seen: Visibility) -> Tensor:
    """The map of a quantity that a selection does not look at: zeros, (num_q_blocks, num_kv_blocks)."""
    return _empty_map(seen).double()


def _empty_map(seen: Visibility) -> Tensor:
    return torch.zeros(seen.num_q_blocks, seen.num_kv_blocks, dtype=torch.bool)


def stacked(heads: list[Head], batch: int) -> ReferenceResult:
    """All heads of all batch rows, field by field; `heads` goes through the heads of one batch row after the other."""
    named = [{**head.mask._asdict(), **head.decision._asdict(), **head.margins._asdict()} for head in heads]
    columns = {field.name: _column([head[field.name] for head in named]) for field in fields(ReferenceResult)}
    return ReferenceResult(**{name: column.unflatten(0, (batch, -1)) for name, column in columns.items()})


def _column(values: list[Any]) -> Tensor:
    """One field of every head; numbers become float64, int64 or bool."""
    if isinstance(values[0], Tensor):
        return torch.stack(values)
    return torch.tensor(values, dtype=torch.float64 if isinstance(values[0], float) else None)
