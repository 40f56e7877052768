"""Triton kernels for the last rows of a call, which attend to the keys in parts: the parts' lists, and their joined attention."""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from flexmask.base.selection import BlockLists
from flexmask.kernels.launch import cdiv, kernel, next_power_of_2

_TILE = 128
# parts at a time, and their values in a program
_AT_ONCE = 8
_VALUES = 4096


@kernel
def _part_lists_kernel(
    partial_count,  # (batch, num_heads, parts * blocks) int32
    partial_indices,  # (batch, num_heads, parts * blocks, num_kv_blocks) int32
    full_count, full_indices, num_kv_blocks, kv_len, parts,
    blocks,  # query blocks of a copy of the rows
    BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    o_list = tl.program_id(1).to(tl.int64) * tl.num_programs(0) + tl.program_id(0)
    part = tl.program_id(0) // blocks
    first = part * num_kv_blocks // parts
    end = (part + 1) * num_kv_blocks // parts
    # blocks with a key that the last copy's first row does not see
    num_partial = tl.where(part == parts - 1, num_kv_blocks - (kv_len - blocks * BLOCK_SIZE) // BLOCK_SIZE, 0)
    num_full = end - first - num_partial
    tl.store(partial_count + o_list, num_partial)
    tl.store(full_count + o_list, num_full)
    for start in range(0, num_kv_blocks, TILE):
        o_kv = start + tl.arange(0, TILE)
        m_kv = o_kv < num_kv_blocks
        p_entry = o_list * num_kv_blocks + o_kv
        tl.store(partial_indices + p_entry, tl.where(o_kv < num_partial, first + num_full + o_kv, 0), mask=m_kv)
        tl.store(full_indices + p_entry, tl.where(o_kv < num_full, first + o_kv, 0), mask=m_kv)


def part_lists(like: Tensor, heads: tuple[int, int], blocks: int, parts: int, kv_len: int, block_size: int) -> BlockLists:
    """Lists of `parts` copies of a call's last `blocks` query blocks, on the device of `like`: each has a part of the keys.

    `heads` are batch and num_heads. Only the last copy has partial blocks.
    """
    num_kv_blocks = cdiv(kv_len, block_size)
    shape = (*heads, parts * blocks)
    partial_count, full_count = (like.new_empty(shape, dtype=torch.int32) for _ in range(2))
    partial_indices, full_indices = (like.new_empty((*shape, num_kv_blocks), dtype=torch.int32) for _ in range(2))
    lists = BlockLists(partial_count, partial_indices, full_count, full_indices)
    _part_lists_kernel[(parts * blocks, heads[0] * heads[1])](
        *lists, num_kv_blocks, kv_len, parts, blocks, BLOCK_SIZE=block_size, TILE=_TILE, num_warps=1
    )
    return lists


@kernel
def _join_kernel(
    part_out, part_lse, out,
    lse,  # written if HAS_LSE
    part_out_stride_part, part_out_stride_batch, part_out_stride_head, part_out_stride_row, part_lse_stride_part,
    part_lse_stride_batch, part_lse_stride_head, out_stride_batch, out_stride_head, out_stride_row, lse_stride_batch,
    lse_stride_head, num_heads, parts, rows,
    HEAD_DIM: tl.constexpr, PADDED_DIM: tl.constexpr, TILE: tl.constexpr, AT_ONCE: tl.constexpr, HAS_LSE: tl.constexpr,
):  # fmt: skip
    batch = (tl.program_id(1) // num_heads).to(tl.int64)
    head = tl.program_id(1) % num_heads
    o_row = tl.program_id(0) * TILE + tl.arange(0, TILE)
    o_dim = tl.arange(0, PADDED_DIM)
    m_row = o_row < rows
    m_dim = o_dim < HEAD_DIM
    p_lse = part_lse + batch * part_lse_stride_batch + head * part_lse_stride_head + o_row[None, :]
    p_part = part_out + batch * part_out_stride_batch + head * part_out_stride_head + o_dim[None, None, :]
    p_part += o_row[None, :, None] * part_out_stride_row
    b_max = tl.full([TILE], float("-inf"), tl.float32)
    b_total = tl.zeros([TILE], tl.float32)
    b_sum = tl.zeros([TILE, PADDED_DIM], tl.float32)
    for start in range(0, parts, AT_ONCE):
        o_part = start + tl.arange(0, AT_ONCE)
        m_part = (o_part < parts)[:, None] & m_row[None, :]
        b_lse = tl.load(p_lse + o_part[:, None] * part_lse_stride_part, mask=m_part, other=float("-inf"))
        b_part = tl.load(
            p_part + o_part[:, None, None].to(tl.int64) * part_out_stride_part,
            mask=m_part[:, :, None] & m_dim[None, None, :],
            other=0.0,
        )
        b_new_max = tl.maximum(b_max, tl.max(b_lse, 0))
        b_base = tl.where(b_new_max == float("-inf"), 0.0, b_new_max)
        b_rescale = tl.exp(b_max - b_base)
        b_weight = tl.exp(b_lse - b_base[None, :])
        b_total = b_total * b_rescale + tl.sum(b_weight, 0)
        b_sum = b_sum * b_rescale[:, None] + tl.sum(b_part.to(tl.float32) * b_weight[:, :, None], 0)
        b_max = b_new_max
    # a total of 0: the row sees nothing
    b_out = b_sum / tl.where(b_total == 0, 1.0, b_total)[:, None]
    p_out = out + batch * out_stride_batch + head * out_stride_head + o_row[:, None] * out_stride_row + o_dim[None, :]
    tl.store(p_out, b_out.to(out.dtype.element_ty), mask=m_row[:, None] & m_dim[None, :])
    if HAS_LSE:
        p_lse_out = lse + batch * lse_stride_batch + head * lse_stride_head + o_row
        tl.store(p_lse_out, b_max + tl.log(tl.where(b_total == 0, 1.0, b_total)), mask=m_row)


def join_parts(part_out: Tensor, part_lse: Tensor, out: Tensor, lse: Tensor | None = None) -> None:
    """Write the joined attention into `out`, (batch, num_heads, rows, head_dim), and its log-sum-exp into `lse`.

    `part_out` is (parts, batch, num_heads, rows, head_dim), `part_lse` (parts, batch, num_heads, rows) float32. The last
    dimension of each has stride 1.
    """
    parts, batch, num_heads, rows, head_dim = part_out.shape
    padded_dim = next_power_of_2(head_dim)
    tile = max(1, _VALUES // (padded_dim * _AT_ONCE))
    some_lse = part_lse[0] if lse is None else lse
    _join_kernel[(cdiv(rows, tile), batch * num_heads)](
        part_out, part_lse, out, some_lse, *part_out.stride()[:4], *part_lse.stride()[:3], *out.stride()[:3],
        *some_lse.stride()[:2], num_heads, parts, rows,
        HEAD_DIM=head_dim, PADDED_DIM=padded_dim, TILE=tile, AT_ONCE=_AT_ONCE, HAS_LSE=lse is not None, num_warps=4,
    )  # fmt: skip
