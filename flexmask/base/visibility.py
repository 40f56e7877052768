"""Visibility by token, by block and by line: causality, padding, window and the chunk's offset.

A pair (row, key) is visible iff both tokens are valid, ``0 <= position - k`` and, with a window, ``position - k < window``.
Keys at positions ``>= offset + q_len`` are not valid. Leading sizes are batch, or 1 where all batch rows agree.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from flexmask._torch import is_traced


class Tokens(NamedTuple):
    """Positions of the query rows, and valid tokens."""

    offset: Tensor  # (..,) int64: position of query row 0
    key_valid: Tensor  # (.., kv_len) bool
    row_valid: Tensor  # (.., q_len) bool
    padded: bool  # without an attention mask every query row is valid
    filled: bool  # every key is valid: neither padding nor an offset


class BlockEdges(NamedTuple):
    """Edges that decide whether a pair of blocks is visible or full; positions are int64.

    A query block sees every key block that one of its valid rows stands in. Of an earlier key block its first valid row sees
    something iff the block's last valid key lies in that row's window; later rows see no more.
    """

    first_row: Tensor  # (.., num_q_blocks)
    last_row: Tensor  # (.., num_q_blocks)
    first_valid_row: Tensor  # (.., num_q_blocks); 2 * kv_len without any
    own_first: Tensor  # (.., num_q_blocks): key block of the first row, -1 if no valid row stands in it
    own_last: Tensor  # (.., num_q_blocks): key block of the last row, likewise
    rows_whole: Tensor  # (.., num_q_blocks) bool: every row is valid
    last_valid_key: Tensor  # (.., num_kv_blocks); -kv_len without any
    keys_whole: Tensor  # (.., num_kv_blocks) bool: every key is valid


class BlockVisibility(NamedTuple):
    """Visible and full pairs of blocks."""

    visible: Tensor  # (.., num_q_blocks, num_kv_blocks) bool: some pair is visible
    full: Tensor  # every existing pair is visible
    first_row_block: Tensor  # (.., num_q_blocks) int64: key block of the first row's position
    last_row_block: Tensor  # of the last row's


def num_blocks(length: int, block_size: int) -> int:
    return (length + block_size - 1) // block_size


def token_validity(q_len: int, kv_len: int, offset: Tensor | None, attention_mask: Tensor | None, key: Tensor) -> Tokens:
    """Positions and validity of every token; `offset` (None: bottom-right alignment) is clamped to [0, kv_len - q_len]."""
    filled = offset is None and attention_mask is None
    if offset is None:
        offset = torch.full((1,), kv_len - q_len, dtype=torch.int64, device=key.device)
    else:
        offset = offset.to(torch.int64).clamp(0, kv_len - q_len).reshape(-1)
    key_valid = torch.arange(kv_len, device=key.device) < (offset + q_len).unsqueeze(-1)
    rows = offset.unsqueeze(-1) + torch.arange(q_len, device=key.device)
    if attention_mask is None:
        return Tokens(offset, key_valid, torch.ones_like(rows, dtype=torch.bool), padded=False, filled=filled)
    key_valid = key_valid & (attention_mask != 0)
    row_valid = key_valid.gather(1, rows.expand(key_valid.shape[0], -1))
    return Tokens(offset.expand(key_valid.shape[0]), key_valid, row_valid, padded=True, filled=filled)


def block_edges(tokens: Tokens, block_size: int) -> BlockEdges:
    device = tokens.offset.device
    kv_len, q_len = tokens.key_valid.shape[1], tokens.row_valid.shape[1]
    first_key = _first_keys(tokens, block_size)
    keys_whole = valid_keys(tokens, block_size) == (first_key + block_size).clamp(max=kv_len) - first_key

    first_slot = torch.arange(num_blocks(q_len, block_size), device=device) * block_size
    first_row = tokens.offset.unsqueeze(-1) + first_slot
    last_row = tokens.offset.unsqueeze(-1) + (first_slot + block_size).clamp(max=q_len) - 1
    own_first, own_last = first_row // block_size, last_row // block_size
    if tokens.padded:
        row_valid = in_blocks(tokens.row_valid, block_size, False)
        row_position = first_row.unsqueeze(-1) + torch.arange(block_size, device=device)
        first_valid_row = torch.where(row_valid, row_position, 2 * kv_len).amin(-1)
        rows_whole = row_valid.sum(-1) == last_row + 1 - first_row
        row_block = torch.where(row_valid, row_position // block_size, -1)
        own_first = torch.where(row_block == own_first.unsqueeze(-1), row_block, -1).amax(-1)
        own_last = torch.where(row_block == own_last.unsqueeze(-1), row_block, -1).amax(-1)
    else:
        first_valid_row = first_row
        rows_whole = torch.ones_like(first_row, dtype=torch.bool)
    last_valid_key = last_valid_keys(tokens, block_size)
    return BlockEdges(first_row, last_row, first_valid_row, own_first, own_last, rows_whole, last_valid_key, keys_whole)


def block_visibility(tokens: Tokens, block_size: int, window: int | None) -> BlockVisibility:
    """Exact visibility of every pair of blocks, from their edges."""
    edges, kv_len = block_edges(tokens, block_size), tokens.key_valid.shape[1]
    kv_block = torch.arange(num_blocks(kv_len, block_size), device=tokens.offset.device)
    first_key = kv_block * block_size
    last_key = (first_key + block_size).clamp(max=kv_len) - 1
    far = kv_len if window is None else min(window, kv_len)  # a distance that no visible pair reaches

    def by_row(x: Tensor) -> Tensor:
        return x.unsqueeze(-1)

    def by_key(x: Tensor) -> Tensor:
        return x.unsqueeze(-2)

    stands_in = (kv_block == by_row(edges.own_first)) | (kv_block == by_row(edges.own_last))
    reaches = by_row(edges.first_valid_row) - by_key(edges.last_valid_key) < far
    earlier = (by_row(edges.first_valid_row) > last_key) & reaches
    full = by_row(edges.rows_whole) & by_key(edges.keys_whole) & (last_key <= by_row(edges.first_row))
    if window is not None:
        full = full & (by_row(edges.last_row) - first_key < window)
    return BlockVisibility(stands_in | earlier, full, edges.first_row // block_size, edges.last_row // block_size)


def blocks_seen_by_rows(positions: Tensor, tokens: Tokens, block_size: int, window: int | None) -> Tensor:
    """Key blocks with a key visible to a valid row at each of `positions`, (batch or 1, rows, num_kv_blocks) bool."""
    kv_len = tokens.key_valid.shape[1]
    kv_block = torch.arange(num_blocks(kv_len, block_size), device=positions.device)
    last_valid_key = last_valid_keys(tokens, block_size).unsqueeze(-2)
    positions = positions.unsqueeze(-1)
    own = positions // block_size
    reaches = positions - last_valid_key < (kv_len if window is None else min(window, kv_len))
    return (kv_block == own) | ((kv_block < own) & reaches)


def visible_keys(positions: Tensor, row_valid: Tensor, tokens: Tokens, window: int | None) -> Tensor:
    """Keys visible to rows at `positions`, (batch or 1, rows, kv_len) bool; `row_valid` is (batch or 1, rows)."""
    key, positions = torch.arange(tokens.key_valid.shape[1], device=positions.device), positions.unsqueeze(-1)
    visible = tokens.key_valid.unsqueeze(-2) & row_valid.unsqueeze(-1) & (key <= positions)
    return visible if window is None else visible & (key > positions - window)


def candidate_lines(tokens: Tokens, block_size: int, window: int | None) -> Tensor:
    """Key blocks, then block diagonals, that hold a visible block, (2, batch or 1, num_kv_blocks) bool."""
    if tokens.padded or window is not None:
        seen = block_visibility(tokens, block_size, window)
        return torch.stack([seen.visible.any(-2), candidate_diagonals(seen)])
    # the last row sees every filled key
    block = torch.arange(num_blocks(tokens.key_valid.shape[1], block_size), device=tokens.offset.device)
    filled = block * block_size < tokens.offset.unsqueeze(-1) + tokens.row_valid.shape[1]
    return filled.expand(2, *filled.shape)


def candidate_diagonals(seen: BlockVisibility) -> Tensor:
    """Block diagonals that hold a visible block, (batch or 1, num_kv_blocks) bool."""
    visible = seen.visible
    diagonal = torch.arange(visible.shape[-1], device=visible.device)
    holds = torch.zeros_like(visible[:, 0])
    for row_diagonal in (seen.first_row_block, seen.last_row_block):
        kv_block = row_diagonal.unsqueeze(-1) - diagonal
        on_diagonal = visible.gather(-1, kv_block.clamp(min=0).expand(visible.shape)) & (kv_block >= 0)
        holds = holds | on_diagonal.any(-2)
    return holds


def valid_keys(tokens: Tokens, block_size: int) -> Tensor:
    """Valid keys per key block, int64."""
    if tokens.padded:
        return in_blocks(tokens.key_valid, block_size, False).sum(-1)
    return (_last_filled(tokens, block_size) + 1 - _first_keys(tokens, block_size)).clamp(min=0)


def last_valid_keys(tokens: Tokens, block_size: int) -> Tensor:
    """Position of each key block's last valid key, int64; -kv_len without any."""
    first, none = _first_keys(tokens, block_size), -tokens.key_valid.shape[1]
    if tokens.padded:
        position = first.unsqueeze(-1) + torch.arange(block_size, device=first.device)
        return torch.where(in_blocks(tokens.key_valid, block_size, False), position, none).amax(-1)
    last = _last_filled(tokens, block_size)
    return torch.where(last >= first, last, none)


def _first_keys(tokens: Tokens, block_size: int) -> Tensor:
    return torch.arange(num_blocks(tokens.key_valid.shape[1], block_size), device=tokens.offset.device) * block_size


def _last_filled(tokens: Tokens, block_size: int) -> Tensor:
    """Position of each key block's last filled key; before the block without any."""
    kv_len, q_len = tokens.key_valid.shape[1], tokens.row_valid.shape[1]
    filled = (tokens.offset + q_len).clamp(max=kv_len).unsqueeze(-1)
    return torch.minimum(_first_keys(tokens, block_size) + block_size, filled) - 1


def in_blocks(x: Tensor, block_size: int, fill: bool | float) -> Tensor:
    """Cut the last dimension into blocks, (..., length) -> (..., num_blocks, block_size), the tail filled with `fill`."""
    length = x.shape[-1]
    blocks = num_blocks(length, block_size)
    return F.pad(x, (0, blocks * block_size - length), value=fill).unflatten(-1, (blocks, block_size))


def whole_blocks(x: Tensor, dim: int, block_size: int) -> Tensor:
    """Cut dimension `dim` into (blocks, block_size), the last block filled up with zeros."""
    length = x.shape[dim]
    blocks = num_blocks(length, block_size)
    # uncompiled it saves a copy; compiled, one graph serves all lengths
    if is_traced() or length != blocks * block_size:
        x = F.pad(x, (0, 0) * (x.dim() - 1 - dim) + (0, blocks * block_size - length))
    return x.unflatten(dim, (blocks, block_size))
