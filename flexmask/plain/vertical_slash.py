"""The vertical-slash index: mass by key block and by block diagonal, and which of them are kept (paper, section 3.3).

The paper sums the representative attention ``p[i, k]`` along vertical lines (keys) and slash lines (offsets
``position(i) - k``). Selection by block needs two pooled sums: ``V[j]``, the attention to key block j, and ``S[c]``, where a
slash at offset ``o = cB + x`` counts for block diagonal c by ``1 - x/B`` and for c+1 by ``x/B``, the share of its rows there.

Inside key block j, a row at phase ``r`` of its block P and a key at phase ``y`` have offset ``(P - j)B + r - y``, so the key's
share goes to diagonals P-j, P-j+1 and P-j-1 by ``1 - |r - y|/B``, ``max(0, r - y)/B`` and ``max(0, y - r)/B``: S is three
weighted sums by (row, key block), shifted by P.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from flexmask.base.representative_rows import RepresentativeRows
from flexmask.base.visibility import BlockVisibility, whole_blocks
from flexmask.plain.top_p import ranks, top_p_count


class RowMass(NamedTuple):
    """Attention mass by row and key block, and its share by diagonal, (batch, num_heads, block_size, num_kv_blocks) float32."""

    block: Tensor  # to the key block
    after: Tensor  # of that, to block diagonal P-j+1
    before: Tensor  # of that, to block diagonal P-j-1; the rest goes to P-j


class LineMass(NamedTuple):
    """The representative attention, pooled; V and S are means over the rows taken."""

    vertical: Tensor  # V, (batch, num_heads, num_kv_blocks) float32
    slash: Tensor  # S, the same shape
    by_row: Tensor  # (batch, num_heads, block_size, num_kv_blocks) float32


def row_mass(attention: Tensor, rows: RepresentativeRows, block_size: int) -> RowMass:
    """Sums of the representative attention by row and key block; rows not taken are 0."""
    attention = whole_blocks(attention, 3, block_size)
    row_phase = (rows.position % block_size).unsqueeze(-1)
    # a quotient of integers has the default dtype
    lead = (row_phase - torch.arange(block_size, device=attention.device)).float() / block_size
    weights = torch.stack([torch.ones_like(lead), lead.clamp(min=0), (-lead).clamp(min=0)], -1)
    weights = torch.where(rows.taken[..., None, None], weights, 0.0)
    return RowMass(*(attention @ weights[:, None]).unbind(-1))


def line_mass(sums: RowMass, rows: RepresentativeRows, block_size: int) -> LineMass:
    """Means over the representative rows by key block and by block diagonal."""
    own_block = rows.position // block_size
    slash = _by_diagonal(sums.block - sums.after - sums.before, own_block)
    slash = slash + _by_diagonal(sums.after, own_block + 1) + _by_diagonal(sums.before, own_block - 1)
    taken = rows.taken.sum(-1).clamp(min=1)[:, None, None]
    return LineMass(sums.block.sum(2) / taken, slash / taken, sums.block)


def _by_diagonal(sums: Tensor, last_block: Tensor) -> Tensor:
    """Each row contributes its key block ``last_block - c`` to diagonal c."""
    blocks = sums.shape[-1]
    kv_block = last_block.unsqueeze(-1) - torch.arange(blocks, device=sums.device)
    exists = (kv_block >= 0) & (kv_block < blocks)
    kv_block = kv_block.clamp(0, blocks - 1)[:, None].expand(sums.shape)
    return torch.where(exists[:, None], sums.gather(-1, kv_block), 0.0).sum(2)


def line_counts(
    values: Tensor, candidates: Tensor, gamma: Tensor, min_blocks: int, max_blocks: int | None
) -> tuple[Tensor, Tensor]:
    """Count the lines of one family that a vertical-slash head keeps, and a query-aware head (its floor), int64.

    The floor comes last.
    """
    available = candidates.sum(-1)
    count = top_p_count(values, candidates, gamma)
    if max_blocks is not None:
        count = count.clamp(max=max_blocks)
    floor = available.clamp(max=min_blocks)
    return torch.maximum(count, floor), floor


def kept_lines(
    mass: LineMass, candidates: Tensor, is_query_aware: Tensor, gamma: Tensor, min_blocks: int, max_blocks: int | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Key blocks and block diagonals to keep: top-p of each family, within floor and cap; query-aware heads keep the floor."""
    lines = torch.stack([mass.vertical, mass.slash])
    candidates = candidates.unsqueeze(2)
    count, floor = line_counts(lines, candidates, gamma, min_blocks, max_blocks)
    count = torch.where(is_query_aware, floor, count)
    vertical, slash = (ranks(lines, candidates) < count.unsqueeze(-1)).unbind(0)
    return vertical, slash, count


class Lines(NamedTuple):
    """The lines that each head keeps."""

    vertical: Tensor  # (batch, num_heads, num_kv_blocks) bool: key blocks
    slash: Tensor  # (batch, num_heads, num_kv_blocks) bool: block diagonals
    number: Tensor  # (2, batch, num_heads) int64


def extended_lines(vertical: Tensor, slash: Tensor, seen: BlockVisibility) -> Tensor:
    """Extend kept key blocks and block diagonals, (batch, num_heads, num_kv_blocks) bool, over the whole map.

    A query block whose rows stand in two key blocks lies on two diagonals.
    """
    kv_block = torch.arange(vertical.shape[-1], device=vertical.device)
    kept = vertical.unsqueeze(-2)
    for row_diagonal in (seen.first_diagonal, seen.last_diagonal):
        diagonal = row_diagonal.unsqueeze(-1) - kv_block
        index = diagonal.clamp(min=0)[:, None].expand(*slash.shape[:2], -1, -1)
        on_diagonal = slash.unsqueeze(-2).expand(index.shape).gather(-1, index)
        kept = kept | (on_diagonal & (diagonal >= 0)[:, None])
    return kept


def blocks_kept_always(seen: BlockVisibility) -> Tensor:
    """First visible key block and the diagonal blocks of every query block, (batch or 1, num_q_blocks, num_kv_blocks) bool."""
    kv_block = torch.arange(seen.visible.shape[-1], device=seen.visible.device)
    first = seen.visible.int().argmax(-1, keepdim=True)
    kept = (kv_block == first) | (kv_block == seen.first_diagonal.unsqueeze(-1))
    return seen.visible & (kept | (kv_block == seen.last_diagonal.unsqueeze(-1)))
