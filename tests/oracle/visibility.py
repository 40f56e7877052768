"""Visible pairs of one batch row, and the blocks and block diagonals that follow from them."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

Block = tuple[int, int]  # (query block r, key block j)


class Visibility(NamedTuple):
    """One batch row: its tokens, its visible pairs, and both by block.

    Query row t stands at position ``offset + t``. A pair is visible if both tokens are valid, the key is not after the row and,
    with a window, ``position - key < window``.
    """

    block_size: int
    offset: int
    valid_rows: list[int]
    valid_keys: Tensor  # (kv_len,) bool: tokens that are filled in and are not padding
    pairs: Tensor  # (q_len, kv_len) bool
    visible_blocks: list[Block]  # blocks that hold a visible pair, row by row
    full_blocks: list[Block]  # blocks whose existing pairs are all visible
    position_blocks: list[list[int]]  # for each query block, floor(position / B) of its rows
    num_kv_blocks: int
    window: int | None = None

    @property
    def num_q_blocks(self) -> int:
        return len(self.position_blocks)

    @property
    def key_blocks(self) -> list[int]:
        """Key blocks that hold a visible block."""
        return sorted({j for _, j in self.visible_blocks})

    @property
    def diagonals(self) -> list[int]:
        """Block diagonals that hold a visible block."""
        return sorted({c for r, j in self.visible_blocks for c in self.diagonals_of(r, j)})

    def blocks_of(self, r: int) -> list[int]:
        """Key blocks that query block r sees."""
        return [j for row, j in self.visible_blocks if row == r]

    def rows_of(self, r: int, blocks: int = 1) -> list[int]:
        """Valid rows of query block r, or of as many from it on."""
        return [row for row in self.valid_rows if r <= row // self.block_size < r + blocks]

    def diagonals_of(self, r: int, j: int) -> list[int]:
        """Two if the chunk starts inside a block."""
        return [block - j for block in self.position_blocks[r] if block >= j]


def query_offsets(q_offset: int | Tensor | None, batch: int, largest: int) -> list[int]:
    """Position of query row 0 by batch row; a tensor is clamped."""
    if q_offset is None:
        return [largest] * batch
    if isinstance(q_offset, Tensor):
        return q_offset.cpu().clamp(0, largest).expand(batch).tolist()
    return [q_offset] * batch


def visibility(q_len: int, offset: int, is_token: Tensor, window: int | None, block_size: int) -> Visibility:
    """From tokens, (kv_len,) bool, that are not padding."""
    kv_len = len(is_token)
    slot = torch.arange(kv_len)
    position = offset + torch.arange(q_len)
    valid_keys = is_token & (slot < offset + q_len)
    distance = position[:, None] - slot[None, :]
    pairs = is_token[position][:, None] & valid_keys[None, :] & (distance >= 0)
    if window is not None:
        pairs = pairs & (distance < window)

    num_q_blocks = math.ceil(q_len / block_size)
    num_kv_blocks = math.ceil(kv_len / block_size)
    visible_blocks, full_blocks, position_blocks = [], [], []
    for r in range(num_q_blocks):
        rows = range(r * block_size, min((r + 1) * block_size, q_len))
        position_blocks.append(sorted({(offset + row) // block_size for row in rows}))
        for j in range(num_kv_blocks):
            block = pairs[rows.start : rows.stop, j * block_size : (j + 1) * block_size]
            if block.any():
                visible_blocks.append((r, j))
            if block.all():
                full_blocks.append((r, j))
    valid_rows = [row for row in range(q_len) if is_token[offset + row]]
    return Visibility(
        block_size, offset, valid_rows, valid_keys, pairs, visible_blocks, full_blocks, position_blocks, num_kv_blocks, window
    )
