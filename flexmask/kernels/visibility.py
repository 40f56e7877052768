"""Triton kernels for the geometry of blocks: their edges, the representative rows, and which blocks see which."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from flexmask.base.inputs import PositionedInputs
from flexmask.base.visibility import max_seen_blocks_in_prompt, num_blocks
from flexmask.kernels.launch import cdiv, kernel, next_power_of_2

_BLOCKS = 16  # that a program takes
_TILE = 128  # at a time
_ROWS = 1024
SUBSETS = ("last", "middle")


class KernelGeometry(NamedTuple):
    """The geometry as kernels read it, int32.

    Planes of `q_edges`, per query block: last row, first row, first valid row, last valid row, last whole key (`row_edges`), then
    the number of key blocks seen. `max_seen` is the largest of these numbers, by `max_seen_blocks_in_prompt`. Planes of
    `kv_edges`, per key block: the last valid key (-kv_len without any), whether all keys are valid, the number of valid keys, and
    the candidates: key blocks, then block diagonals, that hold a visible block. `representative` has a plane for each name in
    `SUBSETS`: the offset, then the rows, -1 where there is none.
    """

    q_edges: Tensor  # (batch, 6, num_q_blocks)
    kv_edges: Tensor  # (batch, 5, num_kv_blocks)
    representative: Tensor  # (2, batch, 1 + block_size)
    max_seen: Tensor  # (batch,)

    @property
    def num_seen(self) -> Tensor:
        """Number of key blocks that each query block sees, (batch, num_q_blocks)."""
        return self.q_edges[:, 5]


def kernel_geometry(inputs: PositionedInputs, block_size: int) -> KernelGeometry:
    """The edges of all blocks, and the representative rows."""
    query, mask, offset = inputs.query, inputs.attention_mask, inputs.offset
    batch, q_len, kv_len = query.shape[0], query.shape[2], inputs.key.shape[2]
    q_blocks, kv_blocks = num_blocks(q_len, block_size), num_blocks(kv_len, block_size)
    q_edges, kv_edges, representative, max_seen = (
        query.new_empty(shape, dtype=torch.int32)
        for shape in ((batch, 6, q_blocks), (batch, 5, kv_blocks), (2, batch, 1 + block_size), (batch,))
    )
    counted = mask is not None or inputs.window is not None
    max_blocks = max(q_blocks, kv_blocks)
    padded_size = next_power_of_2(block_size)
    _edges_kernel[(cdiv(max_blocks, _BLOCKS) + 1, batch)](
        q_edges if mask is None else mask, q_edges if offset is None else offset, q_edges, kv_edges, representative,
        max_seen, q_len, kv_len, q_blocks, kv_blocks, HAS_OFFSET=offset is not None, HAS_ATTENTION_MASK=mask is not None,
        COUNTED=counted, BLOCK_SIZE=block_size, PADDED_SIZE=padded_size, BLOCKS=_BLOCKS, ROWS=_ROWS,
    )  # fmt: skip
    if counted:
        _visible_kernel[(max_blocks, batch)](
            q_edges, kv_edges, max_seen, kv_len, q_blocks, kv_blocks, inputs.distance_limit, BLOCK_SIZE=block_size, TILE=_TILE
        )  # fmt: skip
    max_seen = max_seen_blocks_in_prompt(max_seen, inputs.end, inputs.prompt_len, block_size, inputs.window)
    return KernelGeometry(q_edges, kv_edges, representative, max_seen)


@kernel
def _edges_kernel(
    mask,  # (batch, kv_len) bool, read if HAS_ATTENTION_MASK
    offsets,  # (batch,) int32, read if HAS_OFFSET; else row 0 stands at position 0
    q_edges, kv_edges, representative,
    max_seen,  # (batch,) int32
    q_len, kv_len, num_q_blocks, num_kv_blocks,
    HAS_OFFSET: tl.constexpr, HAS_ATTENTION_MASK: tl.constexpr, COUNTED: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    PADDED_SIZE: tl.constexpr, BLOCKS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    batch = tl.program_id(1)
    offset = 0
    if HAS_OFFSET:
        offset = tl.load(offsets + batch)
    filled_end = offset + q_len
    p_mask = mask + batch.to(tl.int64) * kv_len
    o_slot = tl.arange(0, PADDED_SIZE)
    if tl.program_id(0) == tl.num_programs(0) - 1:
        # the representative rows: of n valid ones the last BLOCK_SIZE, and those in the middle
        number = q_len
        if HAS_ATTENTION_MASK:
            b_rows = tl.zeros([ROWS], tl.int32)
            for start in range(0, q_len, ROWS):
                o_row = start + tl.arange(0, ROWS)
                b_rows += (tl.load(p_mask + offset + o_row, mask=o_row < q_len, other=0) != 0).to(tl.int32)
            number = tl.sum(b_rows, 0)
        first = tl.maximum(number - BLOCK_SIZE, 0)
        # under a window or padding `_visible_kernel` finds it
        tl.store(max_seen + batch, 0 if COUNTED else (filled_end - 1) // BLOCK_SIZE + 1)
        p_rows = representative + batch * (1 + BLOCK_SIZE)
        plane = tl.num_programs(1) * (1 + BLOCK_SIZE)
        m_slot = o_slot < BLOCK_SIZE
        for subset in tl.static_range(2):
            tl.store(p_rows + subset * plane, offset)
            b_row = (first >> subset) + o_slot
            # under padding the rows themselves follow below
            m_written = m_slot & (o_slot >= number) if HAS_ATTENTION_MASK else m_slot
            tl.store(p_rows + subset * plane + 1 + o_slot, tl.where(o_slot < number, b_row, -1), mask=m_written)
        if HAS_ATTENTION_MASK:
            before = 0
            for start in range(0, q_len, ROWS):
                o_row = start + tl.arange(0, ROWS)
                b_valid = (tl.load(p_mask + offset + o_row, mask=o_row < q_len, other=0) != 0).to(tl.int32)
                b_ordinal = before + tl.cumsum(b_valid, 0) - b_valid
                for subset in tl.static_range(2):
                    b_slot = b_ordinal - (first >> subset)
                    m_taken = (b_valid != 0) & (b_slot >= 0) & (b_slot < BLOCK_SIZE)
                    tl.store(p_rows + subset * plane + 1 + b_slot, o_row, mask=m_taken)
                before += tl.sum(b_valid, 0)
    else:
        o_block = tl.program_id(0) * BLOCKS + tl.arange(0, BLOCKS)
        o_first = o_block * BLOCK_SIZE
        # key blocks
        m_kv = o_block < num_kv_blocks
        b_number = tl.maximum(tl.minimum(o_first + BLOCK_SIZE, filled_end) - o_first, 0)
        b_last_valid = tl.where(b_number > 0, o_first + b_number - 1, -kv_len)
        if HAS_ATTENTION_MASK:
            o_key = o_first[:, None] + o_slot[None, :]
            m_key = (o_slot < BLOCK_SIZE)[None, :] & (o_key < filled_end)
            m_key = m_key & (tl.load(p_mask + o_key, mask=m_key, other=0) != 0)
            b_number = tl.sum(m_key.to(tl.int32), 1)
            b_last_valid = tl.max(tl.where(m_key, o_key, -kv_len), 1)
        b_whole = b_number == tl.minimum(o_first + BLOCK_SIZE, kv_len) - o_first
        p_kv_edges = kv_edges_of(kv_edges, batch, num_kv_blocks) + o_block
        tl.store(p_kv_edges, b_last_valid, mask=m_kv)
        tl.store(p_kv_edges + num_kv_blocks, b_whole.to(tl.int32), mask=m_kv)
        tl.store(p_kv_edges + 2 * num_kv_blocks, b_number, mask=m_kv)
        # without padding and window the last row sees every filled key; else `_visible_kernel` overwrites these
        b_candidate = (o_first < filled_end).to(tl.int32)
        tl.store(p_kv_edges + 3 * num_kv_blocks, b_candidate, mask=m_kv)
        tl.store(p_kv_edges + 4 * num_kv_blocks, b_candidate, mask=m_kv)
        # query blocks
        m_q = o_block < num_q_blocks
        b_first_row = offset + o_first
        b_last_row = offset + tl.minimum(o_first + BLOCK_SIZE, q_len) - 1
        b_first_valid_row = b_first_row
        b_last_valid_row = b_last_row
        b_last_whole_key = b_first_row
        b_seen = b_last_row // BLOCK_SIZE + 1
        if HAS_ATTENTION_MASK:
            b_position = b_first_row[:, None] + o_slot[None, :]
            m_row = (o_slot < BLOCK_SIZE)[None, :] & (b_position <= b_last_row[:, None])
            m_row = m_row & (tl.load(p_mask + b_position, mask=m_row & m_q[:, None], other=0) != 0)
            b_first_valid_row = tl.min(tl.where(m_row, b_position, 2 * num_kv_blocks * BLOCK_SIZE), 1)
            b_last_valid_row = tl.max(tl.where(m_row, b_position, -BLOCK_SIZE), 1)
            m_whole = tl.sum(m_row.to(tl.int32), 1) == b_last_row + 1 - b_first_row
            b_last_whole_key = tl.where(m_whole, b_first_row, -1)
        p_q_edges = q_edges_of(q_edges, batch, num_q_blocks) + o_block
        tl.store(p_q_edges, b_last_row, mask=m_q)
        tl.store(p_q_edges + num_q_blocks, b_first_row, mask=m_q)
        tl.store(p_q_edges + 2 * num_q_blocks, b_first_valid_row, mask=m_q)
        tl.store(p_q_edges + 3 * num_q_blocks, b_last_valid_row, mask=m_q)
        tl.store(p_q_edges + 4 * num_q_blocks, b_last_whole_key, mask=m_q)
        tl.store(p_q_edges + 5 * num_q_blocks, b_seen, mask=m_q)


@kernel
def _visible_kernel(
    q_edges, kv_edges, max_seen, kv_len, num_q_blocks, num_kv_blocks, distance_limit,
    BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Under padding or a window: what each query block sees, and the lines that hold a visible block."""
    index = tl.program_id(0)
    batch = tl.program_id(1)
    p_q_edges = q_edges_of(q_edges, batch, num_q_blocks)
    p_kv_edges = kv_edges_of(kv_edges, batch, num_kv_blocks)
    if index < num_q_blocks:
        _, _, first_valid_row, last_valid_row, _ = row_edges(q_edges, batch, num_q_blocks, index, True)
        b_seen = tl.zeros([TILE], tl.int32)
        for start in range(0, num_kv_blocks, TILE):
            o_kv = start + tl.arange(0, TILE)
            m_kv = o_kv < num_kv_blocks
            b_last_valid_key = tl.load(p_kv_edges + o_kv, mask=m_kv, other=0)
            m_sees = sees(o_kv, first_valid_row, last_valid_row, b_last_valid_key, kv_len, distance_limit, BLOCK_SIZE)
            b_seen += (m_sees & m_kv).to(tl.int32)
        seen = tl.sum(b_seen, 0)
        tl.store(p_q_edges + 5 * num_q_blocks + index, seen)
        tl.atomic_max(max_seen + batch, seen)
    if index < num_kv_blocks:
        last_valid_key = tl.load(p_kv_edges + index)
        b_vertical = tl.zeros([TILE], tl.int32)
        b_slash = tl.zeros([TILE], tl.int32)
        for start in range(0, num_q_blocks, TILE):
            o_q = start + tl.arange(0, TILE)
            m_q = o_q < num_q_blocks
            b_last_row, b_first_row, b_first_valid_row, b_last_valid_row, _ = row_edges(q_edges, batch, num_q_blocks, o_q, m_q)
            m_sees = sees(index, b_first_valid_row, b_last_valid_row, last_valid_key, kv_len, distance_limit, BLOCK_SIZE)
            b_vertical += (m_sees & m_q).to(tl.int32)
            for of_last in tl.static_range(2):
                o_kv = (b_last_row if of_last else b_first_row) // BLOCK_SIZE - index
                m_kv = m_q & (o_kv >= 0)
                b_last_valid_key = tl.load(p_kv_edges + o_kv, mask=m_kv, other=0)
                m_sees = sees(o_kv, b_first_valid_row, b_last_valid_row, b_last_valid_key, kv_len, distance_limit, BLOCK_SIZE)
                b_slash += (m_sees & m_kv).to(tl.int32)
        tl.store(p_kv_edges + 3 * num_kv_blocks + index, (tl.sum(b_vertical, 0) > 0).to(tl.int32))
        tl.store(p_kv_edges + 4 * num_kv_blocks + index, (tl.sum(b_slash, 0) > 0).to(tl.int32))


@triton.jit
def q_edges_of(q_edges, batch, num_q_blocks):
    """The planes of a batch row, each of `num_q_blocks`."""
    return q_edges + batch * 6 * num_q_blocks


@triton.jit
def kv_edges_of(kv_edges, batch, num_kv_blocks):
    """The planes of a batch row, each of `num_kv_blocks`."""
    return kv_edges + batch * 5 * num_kv_blocks


@triton.jit
def num_valid_keys_of(p_kv_edges, num_kv_blocks):
    """The plane with the numbers of valid keys."""
    return p_kv_edges + 2 * num_kv_blocks


@triton.jit
def candidates_of(p_kv_edges, num_kv_blocks):
    """The planes of candidates: key blocks, then block diagonals."""
    return p_kv_edges + 3 * num_kv_blocks


@triton.jit
def row_edges(q_edges, batch, num_q_blocks, o_q, m_q):
    """last_row, first_row, first_valid_row, last_valid_row and last_whole_key of query blocks, -1 outside `m_q`.

    Without a valid row the first lies beyond what any key reaches, the last before block 0. Key blocks are full up to
    `last_whole_key`, -1 if none is.
    """
    p_q_edges = q_edges_of(q_edges, batch, num_q_blocks) + o_q
    last_row = tl.load(p_q_edges, mask=m_q, other=-1)
    first_row = tl.load(p_q_edges + num_q_blocks, mask=m_q, other=-1)
    first_valid_row = tl.load(p_q_edges + 2 * num_q_blocks, mask=m_q, other=-1)
    last_valid_row = tl.load(p_q_edges + 3 * num_q_blocks, mask=m_q, other=-1)
    last_whole_key = tl.load(p_q_edges + 4 * num_q_blocks, mask=m_q, other=-1)
    return last_row, first_row, first_valid_row, last_valid_row, last_whole_key


@triton.jit
def sees(kv_block, first_valid_row, last_valid_row, last_valid_key, kv_len, distance_limit, BLOCK_SIZE: tl.constexpr):
    """True for blocks of queries that see blocks of keys; the arguments broadcast."""
    last_key = tl.minimum(kv_block * BLOCK_SIZE + BLOCK_SIZE, kv_len) - 1
    stands_in = (kv_block == first_valid_row // BLOCK_SIZE) | (kv_block == last_valid_row // BLOCK_SIZE)
    return stands_in | ((first_valid_row > last_key) & (first_valid_row - last_valid_key < distance_limit))
