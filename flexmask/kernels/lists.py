"""A Triton kernel for the index lists: one program per row of blocks joins lines and blocks, and writes each list once."""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from flexmask.base.blocks import BlockProblem
from flexmask.base.selection import BlockLists, ChosenBlocks
from flexmask.kernels.launch import kernel, next_power_of_2
from flexmask.kernels.visibility import kv_edges_of, row_edges, sees

_TILE = 128
_MAX_NEAREST = 2**30  # keeps offsets within int32


@kernel
def _lists_kernel(
    kept_lines,  # int8
    active,  # read if HAS_ACTIVE
    chosen,  # int8, read in active heads if HAS_CHOSEN
    q_edges, kv_edges,
    dense_rows,  # representative, read if HAS_DENSE_ROWS
    partial_count,  # (batch, num_heads, num_q_blocks) int32
    partial_indices,  # map, int32
    full_count, full_indices,
    keep,  # bool, written if WRITE_KEEP
    nearest,  # key blocks that each query block keeps
    num_heads, num_q_blocks, num_kv_blocks, kv_len, distance_limit,
    BLOCK_SIZE: tl.constexpr, HAS_DIAGONALS: tl.constexpr, HAS_CHOSEN: tl.constexpr, HAS_ACTIVE: tl.constexpr,
    HAS_DENSE_ROWS: tl.constexpr, PADDED_SIZE: tl.constexpr, WRITE_KEEP: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    # long rows first
    q_block = num_q_blocks - 1 - tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)
    batch = head // num_heads
    last_row, first_row, first_valid_row, last_valid_row, last_whole_key = row_edges(q_edges, batch, num_q_blocks, q_block, True)
    first_row_block = first_row // BLOCK_SIZE
    last_row_block = last_row // BLOCK_SIZE
    end = tl.minimum(last_row_block + 1, num_kv_blocks)
    p_kv_edges = kv_edges_of(kv_edges, batch, num_kv_blocks)
    p_vertical = kept_lines + head * num_kv_blocks
    p_slash = p_vertical + tl.num_programs(1) * num_kv_blocks
    adds_blocks = q_block >= 0
    if HAS_ACTIVE:
        adds_blocks = tl.load(active + head) != 0
    near_start = tl.minimum(first_row_block - nearest + 1, end)
    if HAS_DENSE_ROWS:
        p_dense_rows = dense_rows + batch * (1 + BLOCK_SIZE) + 1
        # the first is the least: rows ascend
        if (q_block + 1) * BLOCK_SIZE > tl.load(p_dense_rows):
            o_slot = tl.arange(0, PADDED_SIZE)
            b_slot = tl.load(p_dense_rows + o_slot, mask=o_slot < BLOCK_SIZE, other=-1) - q_block * BLOCK_SIZE
            is_dense = tl.sum(((b_slot >= 0) & (b_slot < BLOCK_SIZE)).to(tl.int32), 0) > 0
            near_start = tl.where(is_dense, 0, near_start)

    o_map_row = (head * num_q_blocks + q_block) * num_kv_blocks
    o_lane = tl.arange(0, TILE)
    num_partial = 0
    num_full = 0
    first_visible = num_kv_blocks
    for start in range(0, end, TILE):
        o_kv = start + o_lane
        m_kv = o_kv < end
        b_last_valid_key = tl.load(p_kv_edges + o_kv, mask=m_kv, other=0)
        m_visible = sees(o_kv, first_valid_row, last_valid_row, b_last_valid_key, kv_len, distance_limit, BLOCK_SIZE) & m_kv
        first_visible = tl.minimum(first_visible, tl.min(tl.where(m_visible, o_kv, num_kv_blocks), 0))
        m_keep = tl.load(p_vertical + o_kv, mask=m_kv, other=0) != 0
        if HAS_DIAGONALS:
            m_keep = m_keep | (tl.load(p_slash + first_row_block - o_kv, mask=o_kv <= first_row_block, other=0) != 0)
            m_keep = m_keep | (tl.load(p_slash + last_row_block - o_kv, mask=o_kv <= last_row_block, other=0) != 0)
        if adds_blocks & HAS_CHOSEN:
            m_keep = m_keep | (tl.load(chosen + o_map_row + o_kv, mask=m_visible, other=0) != 0)
        m_keep = m_keep | (o_kv >= near_start) | (o_kv == first_visible) | (o_kv == first_row_block) | (o_kv == last_row_block)
        m_keep = m_keep & m_visible
        b_last_key = tl.minimum(o_kv * BLOCK_SIZE + BLOCK_SIZE, kv_len) - 1
        m_whole = (tl.load(p_kv_edges + num_kv_blocks + o_kv, mask=m_kv, other=0) != 0) & (b_last_key <= last_whole_key)
        m_whole = m_whole & (last_row - o_kv * BLOCK_SIZE < distance_limit)
        # both counts in one number: one running sum places both
        b_counts = tl.where(m_keep, tl.where(m_whole, 65536, 1), 0)
        b_rank = tl.cumsum(b_counts, 0) - b_counts
        tl.store(full_indices + o_map_row + num_full + (b_rank >> 16), o_kv, mask=m_keep & m_whole)
        tl.store(partial_indices + o_map_row + num_partial + (b_rank & 65535), o_kv, mask=m_keep & (m_whole == 0))
        if WRITE_KEEP:
            tl.store(keep + o_map_row + o_kv, m_keep, mask=m_kv)
        counts = tl.sum(b_counts, 0)
        num_full += counts >> 16
        num_partial += counts & 65535
    for start in range(tl.minimum(num_full, num_partial) // TILE * TILE, num_kv_blocks, TILE):
        o_kv = start + o_lane
        m_kv = o_kv < num_kv_blocks
        b_zero = tl.zeros([TILE], tl.int32)
        tl.store(full_indices + o_map_row + o_kv, b_zero, mask=m_kv & (o_kv >= num_full))
        tl.store(partial_indices + o_map_row + o_kv, b_zero, mask=m_kv & (o_kv >= num_partial))
    if WRITE_KEEP:
        for start in range(end // TILE * TILE, num_kv_blocks, TILE):
            o_kv = start + o_lane
            tl.store(keep + o_map_row + o_kv, o_kv < 0, mask=(o_kv >= end) & (o_kv < num_kv_blocks))
    tl.store(full_count + head * num_q_blocks + q_block, num_full)
    tl.store(partial_count + head * num_q_blocks + q_block, num_partial)


def kept_blocks(
    problem: BlockProblem,
    kept_lines: Tensor,
    blocks: ChosenBlocks | None,
    nearest: int = 0,
    dense_rows: Tensor | None = None,
) -> tuple[BlockLists, Tensor | None]:
    """Steps 4 and 5, as `flexmask.plain.kept_blocks`; the map only if `problem.with_map`."""
    inputs, geometry, with_keep = problem.inputs, problem.kernel_geometry, problem.with_map
    batch, num_heads, num_kv_blocks = kept_lines.shape[1:]
    num_q_blocks = geometry.q_edges.shape[2]
    shape = (batch, num_heads, num_q_blocks)
    partial_count, full_count = (kept_lines.new_empty(shape, dtype=torch.int32) for _ in range(2))
    partial_indices, full_indices = (kept_lines.new_empty((*shape, num_kv_blocks), dtype=torch.int32) for _ in range(2))
    keep = kept_lines.new_empty((*shape, num_kv_blocks), dtype=torch.bool) if with_keep else None
    chosen, active_heads = (None, None) if blocks is None else blocks
    _lists_kernel[(num_q_blocks, batch * num_heads)](
        kept_lines, kept_lines if active_heads is None else active_heads, kept_lines if chosen is None else chosen,
        geometry.q_edges, geometry.kv_edges, geometry.q_edges if dense_rows is None else dense_rows, partial_count,
        partial_indices, full_count, full_indices, full_count if keep is None else keep, min(nearest, _MAX_NEAREST), num_heads,
        num_q_blocks, num_kv_blocks, inputs.key.shape[2], inputs.distance_limit,
        BLOCK_SIZE=problem.block_size, HAS_DIAGONALS=kept_lines.shape[0] == 2, HAS_CHOSEN=chosen is not None,
        HAS_ACTIVE=active_heads is not None, HAS_DENSE_ROWS=dense_rows is not None,
        PADDED_SIZE=next_power_of_2(problem.block_size), WRITE_KEEP=keep is not None, TILE=_TILE, num_warps=1,
    )  # fmt: skip
    return BlockLists(partial_count, partial_indices, full_count, full_indices), keep
