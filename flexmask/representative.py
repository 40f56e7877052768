"""Attention of the representative query rows, summed by key block and by block diagonal (the paper's Q-hat and A-hat).

The paper sums the representative attention ``p[i, k]`` along every vertical line (key) and every slash line (offset
``position(i) - k``). Selection here is by block, so only two pooled sums are needed:

- ``V[j]``, the attention to key block j;
- ``S[c]``, where a slash at offset ``o = cB + x`` counts for block diagonal c by ``1 - x/B`` and for c+1 by ``x/B``: the
  share of its rows in which it lies on that diagonal.

Both are linear in p. Inside one key block, a row at phase ``r`` of its own block P and a key at phase ``y`` of block j have
offset ``(P - j)B + r - y``, so the key's share goes to diagonals P-j, P-j+1 and P-j-1 by ``1 - |r - y|/B``,
``max(0, r - y)/B`` and ``max(0, y - r)/B``. S is therefore three weighted sums by (row, key block), shifted by P; no sum along
single diagonals is ever formed.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from flexmask.pooling import capped, grouped_scores, masked_softmax
from flexmask.visibility import Tokens, whole_blocks


class RepresentativeRows(NamedTuple):
    """Up to block_size query rows; the leading size is batch, or 1 where all batch rows agree."""

    row: Tensor  # (batch or 1, block_size) int64 rows of query; 0 where not taken
    taken: Tensor  # (batch or 1, block_size) bool; False where there are fewer valid rows than block_size
    position: Tensor  # (batch or 1, block_size) int64


class RowSums(NamedTuple):
    """What of each row's attention to each key block goes where; each (batch, num_heads, block_size, num_kv_blocks) float32."""

    block: Tensor  # to the key block itself
    after: Tensor  # of that, to block diagonal P-j+1
    before: Tensor  # of that, to block diagonal P-j-1; the rest goes to P-j


class PooledAttention(NamedTuple):
    """The representative attention, pooled; V and S are means over the rows taken."""

    vertical: Tensor  # (batch, num_heads, num_kv_blocks) float32: V, sums to 1
    slash: Tensor  # (batch, num_heads, num_kv_blocks) float32: S by block diagonal, those past the last left out
    by_row: Tensor  # (batch, num_heads, block_size, num_kv_blocks) float32: each row's attention to each key block


def representative_rows(which: str, tokens: Tokens, block_size: int) -> RepresentativeRows:
    """The last (or the middle) block_size valid query rows, adjacent or not; all valid rows where there are fewer."""
    q_len = tokens.row_valid.shape[1]
    slot = torch.arange(block_size, device=tokens.offset.device)
    rank = tokens.row_valid.cumsum(-1) if tokens.padded else None  # (batch, q_len): valid rows up to and with this one
    num_valid = torch.full_like(tokens.offset, q_len) if rank is None else rank[:, -1]
    first = (num_valid - block_size).clamp(min=0)
    if which == "middle":
        first = first // 2
    ordinal = first.unsqueeze(-1) + slot
    taken = ordinal < num_valid.unsqueeze(-1)
    row = ordinal if rank is None else torch.searchsorted(rank, ordinal + 1)
    row = torch.where(taken, row, 0)
    return RepresentativeRows(row, taken, tokens.offset.unsqueeze(-1) + row)


def take_rows(query: Tensor, rows: RepresentativeRows) -> Tensor:
    """The representative rows of query, (batch, num_heads, block_size, head_dim); zero where a slot is not taken."""
    batch, num_heads, _, head_dim = query.shape
    index = rows.row[:, None, :, None].expand(batch, num_heads, -1, head_dim)
    return query.gather(2, index).masked_fill(~rows.taken[:, None, :, None], 0)


def representative_attention(
    query_rows: Tensor,
    key: Tensor,
    rows: RepresentativeRows,
    tokens: Tokens,
    scale: float,
    softcap: float | None,
    window: int | None,
) -> Tensor:
    """Softmax attention of the representative rows to all keys they see (the paper's A-hat).

    `query_rows` is (batch, num_heads, block_size, head_dim) as `take_rows` gives it, `key` is (batch, num_kv_heads, kv_len,
    head_dim). Returns (batch, num_heads, block_size, kv_len) float32; rows not taken hold no meaning.
    """
    position, column = rows.position.unsqueeze(-1), torch.arange(key.shape[2], device=key.device)
    visible = tokens.key_valid.unsqueeze(-2) & rows.taken.unsqueeze(-1) & (column <= position)
    if window is not None:
        visible = visible & (column > position - window)
    return masked_softmax(capped(grouped_scores(query_rows.float() * scale, key), softcap), visible[:, None])


def summed_attention(attention: Tensor, rows: RepresentativeRows, block_size: int) -> RowSums:
    """Sums of the representative attention by row and key block; rows not taken are 0."""
    attention = whole_blocks(attention, 3, block_size)
    row_phase = (rows.position % block_size).unsqueeze(-1)
    lead = (row_phase - torch.arange(block_size, device=attention.device)) / block_size
    weights = torch.stack([torch.ones_like(lead), lead.clamp(min=0), (-lead).clamp(min=0)], -1)
    weights = torch.where(rows.taken[..., None, None], weights, 0.0)
    return RowSums(*(attention @ weights[:, None]).unbind(-1))


def pooled_attention(sums: RowSums, rows: RepresentativeRows, block_size: int) -> PooledAttention:
    """Means over the representative rows by key block and by block diagonal (see the top of this file)."""
    own_block = rows.position // block_size
    slash = _by_diagonal(sums.block - sums.after - sums.before, own_block)
    slash = slash + _by_diagonal(sums.after, own_block + 1) + _by_diagonal(sums.before, own_block - 1)
    taken = rows.taken.sum(-1).clamp(min=1)[:, None, None]
    return PooledAttention(sums.block.sum(2) / taken, slash / taken, sums.block)


def _by_diagonal(sums: Tensor, last_block: Tensor) -> Tensor:
    """Sum over the rows of what diagonal c holds of each: key block ``last_block - c``.

    `sums` is (batch, num_heads, rows, num_kv_blocks), `last_block` (batch or 1, rows); returns (batch, num_heads, num_kv_blocks).
    """
    blocks = sums.shape[-1]
    kv_block = last_block.unsqueeze(-1) - torch.arange(blocks, device=sums.device)
    exists = (kv_block >= 0) & (kv_block < blocks)
    kv_block = kv_block.clamp(0, blocks - 1)[:, None].expand(sums.shape)
    return torch.where(exists[:, None], sums.gather(-1, kv_block), 0.0).sum(2)
