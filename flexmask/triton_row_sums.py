"""Triton kernel for the representative attention: one pass over the keys, nothing of size [rows, kv_len] written.

For each representative row i and key block j it writes the row's peak score in the block and three sums of
``exp2(score - peak)``: plain, and weighted by how far the row's phase leads or trails the key's (`flexmask.representative` says
why that is all a slash needs). The true softmax sums follow from these by a rescale of arrays ``block_size`` times smaller than
the attention. There are no atomics, so the same inputs give the same bits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from flexmask.visibility import num_blocks

_BLOCKS_PER_PROGRAM = 8


@triton.jit
def _row_sums_kernel(
    query,  # (batch, num_heads, rows, head_dim) contiguous
    key,  # (batch, num_kv_heads, kv_len, head_dim), any strides
    position,  # (batch, rows) int32
    taken,  # (batch, rows) int8
    key_valid,  # (batch, kv_len) int8
    peak,  # (batch, num_heads, rows, num_kv_blocks) float32
    sums,  # (3, batch, num_heads, rows, num_kv_blocks) float32
    key_stride_batch,
    key_stride_head,
    key_stride_token,
    key_stride_dim,
    num_kv_heads,
    kv_len,
    num_kv_blocks,
    sums_stride,
    scale,
    softcap,
    window,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    GROUPS: tl.constexpr,
    BLOCKS_PER_PROGRAM: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    MASK_ALWAYS: tl.constexpr,
):
    # the query heads of a group are neighbours in the grid, so that they find the keys in the L2 cache
    tiles: tl.constexpr = BLOCK_SIZE // TILE
    group_head = tl.program_id(0) // tiles
    row_tile = tl.program_id(0) % tiles
    batch = tl.program_id(2) // num_kv_heads
    kv_head = tl.program_id(2) % num_kv_heads
    head = batch * num_kv_heads * GROUPS + kv_head * GROUPS + group_head

    rows = row_tile * TILE + tl.arange(0, TILE)
    dims = tl.arange(0, PADDED_DIM)
    row_position = tl.load(position + batch * BLOCK_SIZE + rows)
    row_taken = tl.load(taken + batch * BLOCK_SIZE + rows) != 0
    row_phase = (row_position % BLOCK_SIZE).to(tl.float32)
    first_position = tl.min(row_position, 0)
    some_not_taken = tl.sum(row_taken.to(tl.int32), 0) < TILE
    first_row = head.to(tl.int64) * BLOCK_SIZE
    q = tl.load(query + (first_row + rows)[:, None] * HEAD_DIM + dims[None, :], mask=dims[None, :] < HEAD_DIM, other=0.0)
    keys = key + batch.to(tl.int64) * key_stride_batch + kv_head.to(tl.int64) * key_stride_head

    first_block = tl.program_id(1) * BLOCKS_PER_PROGRAM
    for block in range(first_block, tl.minimum(first_block + BLOCKS_PER_PROGRAM, num_kv_blocks)):
        highest = tl.full([TILE], float("-inf"), tl.float32)
        total = tl.zeros([TILE], tl.float32)
        after = tl.zeros([TILE], tl.float32)
        before = tl.zeros([TILE], tl.float32)
        for start in tl.static_range(0, BLOCK_SIZE, TILE):
            key_phase = start + tl.arange(0, TILE)
            column = block * BLOCK_SIZE + key_phase
            exists = column < kv_len
            k = tl.load(
                keys + column[None, :].to(tl.int64) * key_stride_token + dims[:, None] * key_stride_dim,
                mask=exists[None, :] & (dims[:, None] < HEAD_DIM),
                other=0.0,
            )
            score = tl.dot(q, k, input_precision="ieee") * scale
            if HAS_SOFTCAP:
                grown = tl.exp2(-2 * 1.4426950408889634 * tl.abs(score / softcap))
                capped = softcap * (1 - grown) / (1 + grown)
                score = tl.where(score < 0, -capped, capped)
            score = score * 1.4426950408889634
            if (((block + 1) * BLOCK_SIZE > first_position) | some_not_taken) | MASK_ALWAYS:
                valid = tl.load(key_valid + batch.to(tl.int64) * kv_len + column, mask=exists, other=0) != 0
                distance = row_position[:, None] - column[None, :]
                visible = (distance >= 0) & valid[None, :] & row_taken[:, None]
                if HAS_WINDOW:
                    visible = visible & (distance < window)
                score = tl.where(visible, score, float("-inf"))
            higher = tl.maximum(highest, tl.max(score, 1))
            base = tl.where(higher == float("-inf"), 0.0, higher)
            shrink = tl.exp2(highest - base)
            weight = tl.exp2(score - base[:, None])
            lead = row_phase[:, None] - key_phase[None, :].to(tl.float32)
            total = total * shrink + tl.sum(weight, 1)
            after = after * shrink + tl.sum(weight * tl.maximum(lead, 0.0), 1)
            before = before * shrink + tl.sum(weight * tl.maximum(-lead, 0.0), 1)
            highest = higher
        place = (first_row + rows) * num_kv_blocks + block
        tl.store(peak + place, highest)
        tl.store(sums + place, total)
        tl.store(sums + sums_stride + place, after / BLOCK_SIZE)
        tl.store(sums + 2 * sums_stride + place, before / BLOCK_SIZE)


def launch_row_sums(
    query: Tensor,
    key: Tensor,
    position: Tensor,
    taken: Tensor,
    key_valid: Tensor,
    padded: bool,
    scale: float,
    softcap: float | None,
    window: int | None,
) -> tuple[Tensor, Tensor]:
    """Run the kernel; see `row_sums`."""
    batch, num_heads, block_size, head_dim = query.shape
    num_kv_heads, kv_len = key.shape[1], key.shape[2]
    blocks = num_blocks(kv_len, block_size)
    peak = torch.empty((batch, num_heads, block_size, blocks), dtype=torch.float32, device=key.device)
    sums = torch.empty((3, *peak.shape), dtype=torch.float32, device=key.device)
    tile = min(128 if head_dim <= 128 and query.dtype != torch.float32 else 32, block_size & -block_size)
    groups = num_heads // num_kv_heads
    grid = (groups * (block_size // tile), triton.cdiv(blocks, _BLOCKS_PER_PROGRAM), batch * num_kv_heads)
    _row_sums_kernel[grid](
        query.contiguous(),
        key,
        position.expand(batch, -1).to(torch.int32).contiguous(),
        taken.expand(batch, -1).contiguous().view(torch.int8),
        key_valid.expand(batch, -1).contiguous().view(torch.int8),
        peak,
        sums,
        *key.stride(),
        num_kv_heads,
        kv_len,
        blocks,
        peak.numel(),
        scale,
        1.0 if softcap is None else softcap,
        kv_len if window is None else window,
        HEAD_DIM=head_dim,
        PADDED_DIM=max(16, triton.next_power_of_2(head_dim)),
        BLOCK_SIZE=block_size,
        TILE=tile,
        GROUPS=groups,
        BLOCKS_PER_PROGRAM=_BLOCKS_PER_PROGRAM,
        HAS_SOFTCAP=softcap is not None,
        HAS_WINDOW=window is not None,
        MASK_ALWAYS=padded or window is not None,
        num_warps=8 if tile == 128 else 4,
    )
    return peak, sums


@torch.library.custom_op("flexmask::row_sums", mutates_args=())
def row_sums(
    query: Tensor,
    key: Tensor,
    position: Tensor,
    taken: Tensor,
    key_valid: Tensor,
    padded: bool,
    scale: float,
    softcap: float | None,
    window: int | None,
) -> tuple[Tensor, Tensor]:
    """Peaks and sums of the representative attention by row and key block.

    Parameters
    ----------
    query
        (batch, num_heads, block_size, head_dim): the representative rows.
    key
        (batch, num_kv_heads, kv_len, head_dim), the same dtype.
    position, taken
        (batch or 1, block_size) int64 and bool.
    key_valid
        (batch or 1, kv_len) bool.
    padded
        Whether key_valid has holes before the last representative row.
    scale, softcap, window
        As in attention.

    Returns
    -------
    tuple of Tensor
        Peaks, (batch, num_heads, block_size, num_kv_blocks) float32 in powers of two, -inf where a row sees nothing of a block;
        and the three sums, (3, batch, num_heads, block_size, num_kv_blocks) float32.
    """
    return launch_row_sums(query, key, position, taken, key_valid, padded, scale, softcap, window)


@row_sums.register_fake
def _(query, key, position, taken, key_valid, padded, scale, softcap, window):
    blocks = num_blocks(key.shape[2], query.shape[2])
    peak = query.new_empty((*query.shape[:3], blocks), dtype=torch.float32)
    return peak, query.new_empty((3, *peak.shape), dtype=torch.float32)
