"""Block edges as kernels read them, and which blocks see which."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from flexmask.base.visibility import Tokens, block_edges, candidate_lines, valid_keys


class PackedEdges(NamedTuple):
    """`BlockEdges` in two int32 tensors; the size after the planes is batch, or 1 where all rows agree."""

    rows: Tensor  # (6, batch or 1, num_q_blocks), in the order of `row_edges`
    # (5, batch or 1, num_kv_blocks): last_valid_key, keys_whole, valid_keys, then candidate_lines
    keys: Tensor

    @property
    def strides(self) -> tuple[int, int, int, int]:
        """Of rows and keys between planes, then between batch rows: 0 where all agree."""
        shared = self.rows.shape[1] == 1
        batch = (0, 0) if shared else (self.rows.shape[2], self.keys.shape[2])
        return self.rows.stride(0), self.keys.stride(0), *batch

    @property
    def last_valid_key(self) -> Tensor:
        """(batch or 1, num_kv_blocks)."""
        return self.keys[0]

    @property
    def key_count(self) -> Tensor:
        """Valid keys, (batch or 1, num_kv_blocks)."""
        return self.keys[2]

    @property
    def candidates(self) -> Tensor:
        """Key blocks and block diagonals that hold a visible block, (2, batch or 1, num_kv_blocks)."""
        return self.keys[3:]


def edges_of(tokens: Tokens, block_size: int, window: int | None) -> PackedEdges:
    """The edges of all blocks; ``last_whole_key`` is the position up to which key blocks are full, -1 if none is."""
    edges = block_edges(tokens, block_size)
    last_whole_key = torch.where(edges.rows_whole, edges.first_row, -1)
    rows = (edges.last_row, edges.first_row, edges.first_valid_row, edges.own_first, edges.own_last, last_whole_key)
    keys = (edges.last_valid_key, edges.keys_whole, valid_keys(tokens, block_size), *candidate_lines(tokens, block_size, window))
    # not torch.stack: it ends in a view, which Inductor (2.11) computes again for each of our kernels
    return PackedEdges(*(torch.cat([x.int().unsqueeze(0) for x in planes]) for planes in (rows, keys)))


@triton.jit
def row_edges(rows, stride, o_q, m_q):
    """last_row, first_row, first_valid_row, own_first, own_last and last_whole_key of query blocks, -1 outside `m_q`."""
    p_rows = rows + o_q
    last_row = tl.load(p_rows, mask=m_q, other=-1)
    first_row = tl.load(p_rows + stride, mask=m_q, other=-1)
    first_valid_row = tl.load(p_rows + 2 * stride, mask=m_q, other=-1)
    own_first = tl.load(p_rows + 3 * stride, mask=m_q, other=-1)
    own_last = tl.load(p_rows + 4 * stride, mask=m_q, other=-1)
    last_whole_key = tl.load(p_rows + 5 * stride, mask=m_q, other=-1)
    return last_row, first_row, first_valid_row, own_first, own_last, last_whole_key


@triton.jit
def sees(kv_block, own_first, own_last, first_valid_row, last_valid_key, last_key, max_distance):
    """True for blocks of queries that see blocks of keys; the arguments broadcast."""
    stands_in = (kv_block == own_first) | (kv_block == own_last)
    return stands_in | ((first_valid_row > last_key) & (first_valid_row - last_valid_key < max_distance))
