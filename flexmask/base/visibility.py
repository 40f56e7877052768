"""Visibility by token, by block and by line: causality, padding, window and the chunk's offset.

A pair (row, key) is visible iff both tokens are valid, ``0 <= position - k`` and, with a window, ``position - k < window``.
Keys at positions ``>= offset + q_len`` are not valid. Leading sizes are batch, or 1 where all batch rows agree.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from flexmask._torch import is_traced


class TokenValidity(NamedTuple):
    """Positions of the query rows, and which rows and keys are valid tokens."""

    offset: Tensor  # (..,) int64: position of query row 0
    position: Tensor  # (.., q_len) int64: position of each query row
    key_valid: Tensor  # (.., kv_len) bool
    row_valid: Tensor  # (.., q_len) bool
    has_attention_mask: bool  # False: every query row is valid
    known_all_valid: bool  # without an attention mask and an offset: all keys are valid, by the shapes alone


class BlockVisibility(NamedTuple):
    """Visible and full pairs of blocks, and the tokens from which they follow."""

    tokens: TokenValidity
    visible: Tensor  # (.., num_q_blocks, num_kv_blocks) bool: some pair of tokens is visible
    full: Tensor  # the same shape: every existing pair of tokens is visible
    first_row_block: Tensor  # (.., num_q_blocks) int64: key block of the first row's position
    last_row_block: Tensor  # (.., num_q_blocks) int64: key block of the last row's position


def num_blocks(length: int, block_size: int) -> int:
    return (length + block_size - 1) // block_size


def max_seen_blocks_in_prompt(
    max_seen: Tensor, end: Tensor | int, prompt_len: int | None, block_size: int, window: int | None
) -> Tensor:
    """Largest number of key blocks that any query block of the whole prompt sees, shaped as `max_seen`, or (batch,).

    `max_seen` is the largest number before `end`. Each later block adds one, up to what the window reaches.
    """
    if prompt_len is None:
        return max_seen
    # int32 holds the sums and the limits
    blocks_in_prompt = min(num_blocks(prompt_len, block_size), 2**30)
    later = blocks_in_prompt - (end + block_size - 1) // block_size
    later = max(later, 0) if isinstance(later, int) else later.clamp(min=0)
    if window is None:
        return max_seen + later
    blocks_in_window = min((window + block_size - 2) // block_size + 1, 2**30)
    return torch.maximum(max_seen, (max_seen + later).clamp(max=blocks_in_window))


@functools.lru_cache(maxsize=128)
def num_visible_blocks(q_len: int, kv_len: int, block_size: int, window: int | None = None) -> int:
    """Number of visible pairs of blocks of a head without padding whose last row is at the last key."""
    pairs = 0
    for first in range(kv_len - q_len, kv_len, block_size):
        earliest = 0 if window is None else max(0, first + 1 - window)
        pairs += (min(first + block_size, kv_len) - 1) // block_size - earliest // block_size + 1
    return pairs


def token_validity(
    q_len: int, kv_len: int, offset: Tensor | None, attention_mask: Tensor | None, key: Tensor, call_end: Tensor | None = None
) -> TokenValidity:
    """Positions and validity of every token; `offset` (None: bottom-right alignment) is clamped to [0, kv_len - q_len].

    Keys are valid up to the last row's position. For a slice of a call's rows they are valid before `call_end`, (batch,), the
    position after the call's last row.
    """
    known_all_valid = offset is None and attention_mask is None
    if offset is None:
        offset = torch.full((1,), kv_len - q_len, dtype=torch.int64, device=key.device)
    else:
        offset = offset.to(torch.int64).clamp(0, kv_len - q_len).reshape(-1)
    key_valid = torch.arange(kv_len, device=key.device) < (offset + q_len if call_end is None else call_end).unsqueeze(-1)
    position = offset.unsqueeze(-1) + torch.arange(q_len, device=key.device)
    if attention_mask is None:
        row_valid = torch.ones_like(position, dtype=torch.bool)
        return TokenValidity(offset, position, key_valid, row_valid, False, known_all_valid)
    key_valid = key_valid & (attention_mask != 0)
    row_valid = key_valid.gather(1, position.expand(key_valid.shape[0], -1))
    return TokenValidity(offset.expand(key_valid.shape[0]), position, key_valid, row_valid, True, known_all_valid)


def block_visibility(tokens: TokenValidity, block_size: int, window: int | None) -> BlockVisibility:
    """Exact visibility of every pair of blocks.

    A query block sees every key block that holds the position of one of its valid rows. It sees an earlier key block iff the
    block's last valid key lies in the window of its first valid row; later rows see no earlier key blocks.
    """
    device, kv_len, q_len = tokens.offset.device, tokens.key_valid.shape[1], tokens.row_valid.shape[1]
    kv_block = torch.arange(num_blocks(kv_len, block_size), device=device)
    first_key = kv_block * block_size
    last_key = (first_key + block_size).clamp(max=kv_len) - 1
    keys_whole = num_valid_keys(tokens, block_size) == last_key + 1 - first_key
    distance_limit = kv_len if window is None else min(window, kv_len)  # which no visible pair reaches

    # a column for each query block
    first_slot = torch.arange(num_blocks(q_len, block_size), device=device) * block_size
    first_row = (tokens.offset.unsqueeze(-1) + first_slot).unsqueeze(-1)
    last_row = first_row + ((first_slot + block_size).clamp(max=q_len) - 1 - first_slot).unsqueeze(-1)
    row_valid = split_into_blocks(tokens.row_valid, block_size)
    position = first_row + torch.arange(block_size, device=device)
    # without a valid row: beyond what any key reaches, and before the first block
    first_valid_row = torch.where(row_valid, position, 2 * kv_block.shape[0] * block_size).amin(-1, keepdim=True)
    last_valid_row = torch.where(row_valid, position, -1).amax(-1, keepdim=True)
    rows_whole = row_valid.sum(-1, keepdim=True) == last_row + 1 - first_row

    stands_in = (kv_block == first_valid_row // block_size) | (kv_block == last_valid_row // block_size)
    reaches = first_valid_row - last_valid_keys(tokens, block_size).unsqueeze(-2) < distance_limit
    full = rows_whole & keys_whole.unsqueeze(-2) & (last_key <= first_row)
    if window is not None:
        full = full & (last_row - first_key < window)
    visible = stands_in | ((first_valid_row > last_key) & reaches)
    return BlockVisibility(tokens, visible, full, first_row.squeeze(-1) // block_size, last_row.squeeze(-1) // block_size)


def blocks_seen_by_rows(positions: Tensor, tokens: TokenValidity, block_size: int, window: int | None) -> Tensor:
    """Key blocks with a key visible to a valid row at each of `positions`, (batch or 1, rows, num_kv_blocks) bool."""
    kv_len = tokens.key_valid.shape[1]
    kv_block = torch.arange(num_blocks(kv_len, block_size), device=positions.device)
    last_valid_key = last_valid_keys(tokens, block_size).unsqueeze(-2)
    positions = positions.unsqueeze(-1)
    row_block = positions // block_size
    reaches = positions - last_valid_key < (kv_len if window is None else min(window, kv_len))
    return (kv_block == row_block) | ((kv_block < row_block) & reaches)


def visible_keys(positions: Tensor, row_valid: Tensor, tokens: TokenValidity, window: int | None) -> Tensor:
    """Keys visible to rows at `positions`, (batch or 1, rows, kv_len) bool; `row_valid` is (batch or 1, rows)."""
    key, positions = torch.arange(tokens.key_valid.shape[1], device=positions.device), positions.unsqueeze(-1)
    visible = tokens.key_valid.unsqueeze(-2) & row_valid.unsqueeze(-1) & (key <= positions)
    return visible if window is None else visible & (key > positions - window)


def candidate_lines(visibility: BlockVisibility) -> Tensor:
    """Key blocks, then block diagonals, that hold a visible block, (2, batch or 1, num_kv_blocks) bool."""
    visible = visibility.visible
    on_diagonal = by_distance(visible, visibility.first_row_block) | by_distance(visible, visibility.last_row_block)
    return torch.stack([visible.any(-2), on_diagonal.any(-2)])


def by_distance(x: Tensor, start: Tensor) -> Tensor:
    """The last dimension of `x` by distance ``start - index`` instead of index, 0 where no index is; `start` broadcasts."""
    size = x.shape[-1]
    index = start.unsqueeze(-1) - torch.arange(size, device=x.device)
    exists = (index >= 0) & (index < size)
    return x.gather(-1, index.clamp(0, size - 1).expand(x.shape)).masked_fill(~exists, 0)


def num_valid_keys(tokens: TokenValidity, block_size: int) -> Tensor:
    """Valid keys per key block, int64."""
    return split_into_blocks(tokens.key_valid, block_size).sum(-1)


def last_valid_keys(tokens: TokenValidity, block_size: int) -> Tensor:
    """Position of each key block's last valid key, int64; -kv_len without any."""
    valid = split_into_blocks(tokens.key_valid, block_size)
    position = torch.arange(valid.shape[1] * block_size, device=valid.device).unflatten(0, (-1, block_size))
    return torch.where(valid, position, -tokens.key_valid.shape[1]).amax(-1)


def split_into_blocks(x: Tensor, block_size: int, dim: int = -1, fill: float = 0) -> Tensor:
    """Split dimension `dim` into (num_blocks, block_size), the last block completed with `fill`."""
    dim %= x.dim()
    length = x.shape[dim]
    blocks = num_blocks(length, block_size)
    # uncompiled it saves a copy; compiled, one graph serves all lengths
    if is_traced() or length != blocks * block_size:
        x = F.pad(x, (0, 0) * (x.dim() - 1 - dim) + (0, blocks * block_size - length), value=fill)
    return x.unflatten(dim, (blocks, block_size))
