"""Triton kernel for the representative attention: one pass over the keys, nothing of size [rows, kv_len] written.

For each representative row i and key block j it writes the row's peak score in the block and three sums of
``exp2(score - peak)``: plain, and weighted by how far the row's phase leads or trails the key's (`flexmask.plain.vertical_slash`
derives why that is all a slash needs). There are no atomics, so the same inputs give the same bits.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from flexmask._torch import computed_once
from flexmask.base.inputs import AttentionInputs
from flexmask.base.representative_rows import RepresentativeRows
from flexmask.base.visibility import num_blocks
from flexmask.kernels.scores import soft_capped

BLOCKS_PER_PROGRAM = 16
# what a program may have of shared memory on the consumer GPUs (compute capability 8.6, 8.9, 12.0), the least of NVIDIA's
_SHARED_MEMORY = 101_376


def packed_rows(rows: RepresentativeRows, offset: Tensor) -> Tensor:
    """The representative rows as kernels read them, (batch or 1, 1 + block_size) int32.

    First the position of query row 0, `offset` (batch or 1,), then the rows of query, -1 where there are fewer.
    """
    rows_taken = torch.where(rows.taken, rows.row, -1)
    return computed_once(torch.cat([offset.unsqueeze(-1).expand(rows_taken.shape[0], 1), rows_taken], -1).int())


class BlockSums(NamedTuple):
    """Peaks and sums that the kernel writes."""

    # (batch, num_heads, num_kv_blocks, block_size, 4) float32, by key block and row: the peak score in powers of two, -inf where
    # the row sees nothing of the block; then the sums, plain, after and before
    blocks: Tensor
    # (batch, num_heads, num_chunks, block_size, 2) float32, by chunk of key blocks and row: peak and plain sum; flat, since
    # num_chunks is often 1, a size that compilers take as a constant
    chunks: Tensor


@triton.jit
def _block_sums_kernel(
    query,  # (batch, num_heads, q_len, head_dim), any strides
    key,  # (batch, num_kv_heads, kv_len, head_dim), any strides
    rows,  # (batch or 1, 1 + block_size) int32: position of query row 0, then rows of query, -1 where not taken
    key_valid,  # (batch, kv_len) int8, read only if PADDED
    sums,  # (batch, num_heads, num_kv_blocks, block_size, 4) float32
    chunks,  # (batch, num_heads, num_chunks, block_size, 2) float32, flat
    rows_stride,  # between batch rows; 0 where all agree
    query_stride_batch,
    query_stride_head,
    query_stride_token,
    query_stride_dim,
    key_stride_batch,
    key_stride_head,
    key_stride_token,
    key_stride_dim,
    num_kv_heads,
    q_len,
    kv_len,
    num_kv_blocks,
    scale,
    softcap,
    window,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    KEYS: tl.constexpr,
    GROUPS: tl.constexpr,
    BLOCKS_PER_PROGRAM: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    PADDED: tl.constexpr,
    ONE_STORE: tl.constexpr,
):
    # compilers hand Python's floats over in float64
    scale = tl.cast(scale, tl.float32)
    softcap = tl.cast(softcap, tl.float32)
    to_log2 = 1.4426950408889634 if HAS_SOFTCAP else scale * 1.4426950408889634
    # the query heads of a group are neighbours in the grid, so that they find the keys in the L2 cache
    TILES: tl.constexpr = BLOCK_SIZE // TILE
    group_head = tl.program_id(0) // TILES
    row_tile = tl.program_id(0) % TILES
    batch = tl.program_id(2) // num_kv_heads
    kv_head = tl.program_id(2) % num_kv_heads
    q_head = kv_head * GROUPS + group_head
    head = (batch * num_kv_heads * GROUPS + q_head).to(tl.int64)

    slot = row_tile * TILE + tl.arange(0, TILE)
    dims = tl.arange(0, PADDED_DIM)
    row = tl.load(rows + batch * rows_stride + 1 + slot)
    row_taken = row >= 0
    first_position = tl.load(rows + batch * rows_stride)
    row_position = first_position + row
    filled = first_position + q_len
    row_phase = (row_position % BLOCK_SIZE).to(tl.float32)
    lowest_row = tl.min(row, 0)
    some_not_taken = lowest_row < 0
    lowest_position = first_position + lowest_row
    queries = query + batch.to(tl.int64) * query_stride_batch + q_head.to(tl.int64) * query_stride_head
    q = tl.load(
        queries + row[:, None].to(tl.int64) * query_stride_token + dims[None, :].to(tl.int64) * query_stride_dim,
        mask=row_taken[:, None] & (dims[None, :] < HEAD_DIM),
        other=0.0,
    )
    keys = key + batch.to(tl.int64) * key_stride_batch + kv_head.to(tl.int64) * key_stride_head

    first_block = tl.program_id(1) * BLOCKS_PER_PROGRAM
    chunk_highest = tl.full([TILE], float("-inf"), tl.float32)
    chunk_total = tl.zeros([TILE], tl.float32)
    for block in range(first_block, tl.minimum(first_block + BLOCKS_PER_PROGRAM, num_kv_blocks)):
        highest = tl.full([TILE], float("-inf"), tl.float32)
        total = tl.zeros([TILE], tl.float32)
        by_phase = tl.zeros([TILE], tl.float32)
        after = tl.zeros([TILE], tl.float32)
        for start in tl.static_range(0, BLOCK_SIZE, KEYS):
            key_phase = start + tl.arange(0, KEYS)
            column = block * BLOCK_SIZE + key_phase
            k = tl.load(
                keys + column[None, :].to(tl.int64) * key_stride_token + dims[:, None].to(tl.int64) * key_stride_dim,
                mask=(column[None, :] < kv_len) & (dims[:, None] < HEAD_DIM),
                other=0.0,
            )
            score = tl.dot(q, k, input_precision="ieee")
            if HAS_SOFTCAP:
                score = soft_capped(score * scale, softcap)
            if ((block + 1) * BLOCK_SIZE > lowest_position) | some_not_taken | PADDED | HAS_WINDOW:
                # what stands in keys that are not valid does not matter, NaN included
                distance = row_position[:, None] - column[None, :]
                visible = (distance >= 0) & (column < filled)[None, :] & row_taken[:, None]
                if HAS_WINDOW:
                    visible = visible & (distance < window)
                if PADDED:
                    valid = tl.load(key_valid + batch.to(tl.int64) * kv_len + column, mask=column < kv_len, other=0) != 0
                    visible = visible & valid[None, :]
                score = tl.where(visible, score, float("-inf"))
            higher = tl.maximum(highest, tl.max(score, 1) * to_log2)
            base = tl.where(higher == float("-inf"), 0.0, higher)
            shrink = tl.exp2(highest - base)
            weight = tl.exp2(score * to_log2 - base[:, None])
            phase = key_phase[None, :].to(tl.float32)
            total = total * shrink + tl.sum(weight, 1)
            by_phase = by_phase * shrink + tl.sum(weight * phase, 1)
            after = after * shrink + tl.sum(weight * tl.maximum(row_phase[:, None] - phase, 0.0), 1)
            highest = higher
        # the mean lead is after - before
        before = tl.maximum(after - (row_phase * total - by_phase), 0.0)
        place = ((head * num_kv_blocks + block) * BLOCK_SIZE + slot) * 4
        if ONE_STORE:
            # of four stores, each would convert the layout of its values
            four = tl.join(tl.join(highest, after / BLOCK_SIZE), tl.join(total, before / BLOCK_SIZE))
            tl.store(
                sums + place[:, None, None] + 2 * tl.arange(0, 2)[None, :, None] + tl.arange(0, 2)[None, None, :],
                four,
            )
        else:
            tl.store(sums + place, highest)
            tl.store(sums + place + 1, total)
            tl.store(sums + place + 2, after / BLOCK_SIZE)
            tl.store(sums + place + 3, before / BLOCK_SIZE)
        higher = tl.maximum(chunk_highest, highest)
        base = tl.where(higher == float("-inf"), 0.0, higher)
        chunk_total = chunk_total * tl.exp2(chunk_highest - base) + total * tl.exp2(highest - base)
        chunk_highest = higher
    place = ((head * tl.num_programs(1) + tl.program_id(1)) * BLOCK_SIZE + slot) * 2
    if ONE_STORE:
        tl.store(chunks + place[:, None] + tl.arange(0, 2)[None, :], tl.join(chunk_highest, chunk_total))
    else:
        tl.store(chunks + place, chunk_highest)
        tl.store(chunks + place + 1, chunk_total)


def _pipeline_stages(block_size: int, tile: int, padded_dim: int, itemsize: int) -> int:
    """Stages of the loop over key blocks: three, or as many as fit into shared memory.

    The loop over the tiles of a key block is unrolled, and Triton buffers each of its loads apart: every stage but one takes the
    keys of a whole block. The number of stages changes no result, so that one rule does for all GPUs of a kind.
    """
    if torch.version.hip is not None:
        return 1  # 64 KiB of shared memory
    row = padded_dim * itemsize
    buffered = _SHARED_MEMORY - 2048 - tile * row
    # by comparisons: block_size may be symbolic in a trace, and the number of stages must not be
    return 3 if 2 * block_size * row <= buffered else 2 if block_size * row <= buffered else 1


def block_sums(inputs: AttentionInputs, rows: Tensor, key_valid: Tensor | None, block_size: int) -> BlockSums:
    """Peaks and sums of the representative attention by row and key block.

    Parameters
    ----------
    inputs
        The problem.
    rows
        (batch or 1, 1 + block_size) int32, from `packed_rows`.
    key_valid
        (batch, kv_len) bool where there is padding, else None: every filled key is valid.
    """
    query, key, softcap, window = inputs.query, inputs.key, inputs.softcap, inputs.window
    batch, num_heads, q_len, head_dim = query.shape
    num_kv_heads, kv_len = key.shape[1], key.shape[2]
    blocks = num_blocks(kv_len, block_size)
    tile = min(128 if head_dim <= 128 and query.dtype != torch.float32 else 32, block_size & -block_size)
    groups = num_heads // num_kv_heads
    sums = query.new_empty((batch, num_heads, blocks, block_size, 4), dtype=torch.float32)
    num_chunks = triton.cdiv(blocks, BLOCKS_PER_PROGRAM)
    chunks = query.new_empty(batch * num_heads * num_chunks * block_size * 2, dtype=torch.float32)
    padded_dim = max(16, triton.next_power_of_2(head_dim))
    grid = (groups * (block_size // tile), num_chunks, batch * num_kv_heads)
    _block_sums_kernel[grid](
        query,
        key,
        rows,
        rows if key_valid is None else key_valid.to(torch.int8).contiguous(),
        sums,
        chunks,
        1 + block_size if rows.shape[0] > 1 else 0,
        *query.stride(),
        *key.stride(),
        num_kv_heads,
        q_len,
        kv_len,
        blocks,
        inputs.scale,
        1.0 if softcap is None else softcap,
        kv_len if window is None else window,
        HEAD_DIM=head_dim,
        PADDED_DIM=padded_dim,
        BLOCK_SIZE=block_size,
        TILE=tile,
        KEYS=min(64, tile),
        GROUPS=groups,
        BLOCKS_PER_PROGRAM=BLOCKS_PER_PROGRAM,
        HAS_SOFTCAP=softcap is not None,
        HAS_WINDOW=window is not None,
        PADDED=key_valid is not None,
        # Triton's layouts of matrix products on RDNA GPUs do not convert to that of the joined values
        ONE_STORE=torch.version.hip is None,
        num_warps=8 if tile == 128 else 4,
        num_stages=_pipeline_stages(block_size, tile, padded_dim, query.element_size()),
    )
    return BlockSums(sums, chunks)
