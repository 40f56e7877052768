"""Triton kernels for the representative attention: one pass over the keys, nothing of size [rows, kv_len] written.

For each representative row i and key block j `block_sums` writes the row's peak score in the block and three sums of
``exp2(score - peak)``: plain, and weighted by how far the row's phase leads or trails the key's (`flexmask.representative` says
why that is all a slash needs). `row_norms` and `line_attention` rescale these by each row's true softmax and sum them
by key block and by block diagonal. There are no atomics, so the same inputs give the same bits.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from flexmask.representative import RepresentativeRows
from flexmask.visibility import num_blocks

_BLOCKS_PER_PROGRAM = 16
_LINES_PER_PROGRAM = 8


def packed_rows(rows: RepresentativeRows, offset: Tensor) -> Tensor:
    """The representative rows as kernels read them, (batch or 1, 1 + block_size) int32.

    First the position of query row 0, `offset` (batch or 1,), then the rows of query, -1 where there are fewer. One tensor,
    because a compiler would compute each of two again for every kernel.
    """
    rows_taken = torch.where(rows.taken, rows.row, -1)
    return torch.cat([offset.unsqueeze(-1).expand(rows_taken.shape[0], 1), rows_taken], -1).int()


class BlockSums(NamedTuple):
    """What the first kernel writes."""

    # (batch, num_heads, num_kv_blocks, block_size, 4) float32, by key block and row: the peak score in powers of two, -inf where
    # the row sees nothing of the block; then the sums, plain, after and before
    blocks: Tensor
    # (batch, num_heads, num_chunks, block_size, 2) float32, by chunk of key blocks and row: peak and plain sum; flat, since
    # num_chunks is often 1, a size that compilers take as a constant
    chunks: Tensor


class RowNorms(NamedTuple):
    """A row's softmax is ``exp2(score - base) * factor``; both (batch, num_heads, block_size) float32."""

    base: Tensor
    factor: Tensor  # 0 for rows not taken


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
        queries + row[:, None].to(tl.int64) * query_stride_token + dims[None, :] * query_stride_dim,
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
                keys + column[None, :].to(tl.int64) * key_stride_token + dims[:, None] * key_stride_dim,
                mask=(column[None, :] < kv_len) & (dims[:, None] < HEAD_DIM),
                other=0.0,
            )
            score = tl.dot(q, k, input_precision="ieee")
            if HAS_SOFTCAP:
                grown = tl.exp2(-2 * 1.4426950408889634 * tl.abs(score * scale / softcap))
                capped = softcap * (1 - grown) / (1 + grown)
                score = tl.where(score < 0, -capped, capped)
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
        # one store of neighbours: of four, each would be laid out anew
        four = tl.join(tl.join(highest, after / BLOCK_SIZE), tl.join(total, before / BLOCK_SIZE))
        place = ((head * num_kv_blocks + block) * BLOCK_SIZE + slot) * 4
        tl.store(
            sums + place[:, None, None] + 2 * tl.arange(0, 2)[None, :, None] + tl.arange(0, 2)[None, None, :],
            four,
        )
        higher = tl.maximum(chunk_highest, highest)
        base = tl.where(higher == float("-inf"), 0.0, higher)
        chunk_total = chunk_total * tl.exp2(chunk_highest - base) + total * tl.exp2(highest - base)
        chunk_highest = higher
    place = ((head * tl.num_programs(1) + tl.program_id(1)) * BLOCK_SIZE + slot) * 2
    tl.store(chunks + place[:, None] + tl.arange(0, 2)[None, :], tl.join(chunk_highest, chunk_total))


def block_sums(
    query: Tensor,
    key: Tensor,
    rows: Tensor,
    key_valid: Tensor | None,
    block_size: int,
    scale: float,
    softcap: float | None,
    window: int | None,
) -> BlockSums:
    """Peaks and sums of the representative attention by row and key block.

    Parameters
    ----------
    query
        (batch, num_heads, q_len, head_dim).
    key
        (batch, num_kv_heads, kv_len, head_dim), the same dtype.
    rows
        (batch or 1, 1 + block_size) int32, from `packed_rows`.
    key_valid
        (batch, kv_len) bool where there is padding, else None: every filled key is valid.
    scale, softcap, window
        As in attention.
    """
    batch, num_heads, q_len, head_dim = query.shape
    num_kv_heads, kv_len = key.shape[1], key.shape[2]
    blocks = num_blocks(kv_len, block_size)
    tile = min(128 if head_dim <= 128 and query.dtype != torch.float32 else 32, block_size & -block_size)
    groups = num_heads // num_kv_heads
    sums = query.new_empty((batch, num_heads, blocks, block_size, 4), dtype=torch.float32)
    num_chunks = triton.cdiv(blocks, _BLOCKS_PER_PROGRAM)
    chunks = query.new_empty(batch * num_heads * num_chunks * block_size * 2, dtype=torch.float32)
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
        scale,
        1.0 if softcap is None else softcap,
        kv_len if window is None else window,
        HEAD_DIM=head_dim,
        PADDED_DIM=max(16, 1 << (head_dim - 1).bit_length()),
        BLOCK_SIZE=block_size,
        TILE=tile,
        KEYS=min(64, tile),
        GROUPS=groups,
        BLOCKS_PER_PROGRAM=_BLOCKS_PER_PROGRAM,
        HAS_SOFTCAP=softcap is not None,
        HAS_WINDOW=window is not None,
        PADDED=key_valid is not None,
        num_warps=8 if tile == 128 else 4,
    )
    return BlockSums(sums, chunks)


@triton.jit
def _row_norms_kernel(chunks, base, factor, num_chunks, ROWS: tl.constexpr, TILE: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    head = tl.program_id(1).to(tl.int64)
    slot = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    highest = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    for start in range(0, num_chunks, TILE):
        chunk = start + tl.arange(0, TILE)
        place = chunks + ((head * num_chunks + chunk[:, None]) * BLOCK_SIZE + slot[None, :]) * 2
        exists = (chunk < num_chunks)[:, None]
        peaks = tl.load(place, mask=exists, other=float("-inf"))
        higher = tl.maximum(highest, tl.max(peaks, 0))
        finite = tl.where(higher == float("-inf"), 0.0, higher)
        weight = tl.exp2(peaks - finite[None, :])
        total = total * tl.exp2(highest - finite) + tl.sum(tl.load(place + 1, mask=exists, other=0.0) * weight, 0)
        highest = higher
    place = head * BLOCK_SIZE + slot
    tl.store(base + place, tl.where(highest == float("-inf"), 0.0, highest))
    tl.store(factor + place, tl.where(total == 0, 0.0, 1.0 / tl.where(total == 0, 1.0, total)))


def row_norms(sums: BlockSums) -> RowNorms:
    """The softmax of every representative row."""
    batch, num_heads, blocks, block_size, _ = sums.blocks.shape
    num_chunks = triton.cdiv(blocks, _BLOCKS_PER_PROGRAM)
    base, factor = (sums.chunks.new_empty((batch, num_heads, block_size)) for _ in range(2))
    _row_norms_kernel[(block_size // 16, batch * num_heads)](
        sums.chunks, base, factor, num_chunks, ROWS=16, TILE=32, BLOCK_SIZE=block_size
    )
    return RowNorms(base, factor)


@triton.jit
def _lines_kernel(
    sums,
    base,
    factor,
    rows,  # (batch or 1, 1 + block_size) int32, as above
    candidates,  # (2, batch or 1, num_kv_blocks) int32
    lines,  # (2, batch, num_heads, num_kv_blocks) float32
    rows_stride,
    candidates_stride,
    candidates_stride_batch,
    num_heads,
    num_kv_blocks,
    lines_stride,
    BLOCK_SIZE: tl.constexpr,
    PADDED_SIZE: tl.constexpr,
    TILE: tl.constexpr,
):
    head = tl.program_id(1).to(tl.int64)
    batch = tl.program_id(1) // num_heads
    line = tl.program_id(0) * TILE + tl.arange(0, TILE)[:, None]
    slot = tl.arange(0, PADDED_SIZE)
    exists = slot < BLOCK_SIZE
    row_base = tl.load(base + head * BLOCK_SIZE + slot, mask=exists, other=0.0)[None, :]
    row_factor = tl.load(factor + head * BLOCK_SIZE + slot, mask=exists, other=0.0)[None, :]
    row = tl.load(rows + batch * rows_stride + 1 + slot, mask=exists, other=-1)
    num_taken = tl.maximum(tl.sum((row >= 0).to(tl.int32), 0), 1).to(tl.float32)
    # what rows that are not taken hold is 0, wherever they stand
    own = ((tl.load(rows + batch * rows_stride) + tl.maximum(row, 0)) // BLOCK_SIZE)[None, :]

    here = (line < num_kv_blocks) & exists[None, :]
    place = sums + ((head * num_kv_blocks + line) * BLOCK_SIZE + slot[None, :]) * 4
    weight = tl.exp2(tl.load(place, mask=here, other=float("-inf")) - row_base) * row_factor
    vertical = tl.sum(tl.load(place + 1, mask=here, other=0.0) * weight, 1)

    # key block own - line lies on the diagonal; part of the one after it and of the one before it counts for it too
    slash = tl.zeros([TILE, PADDED_SIZE], tl.float32)
    for shift in tl.static_range(-1, 2):
        block = own - line + shift
        on = (block >= 0) & (block < num_kv_blocks) & exists[None, :]
        place = sums + ((head * num_kv_blocks + block) * BLOCK_SIZE + slot[None, :]) * 4
        weight = tl.exp2(tl.load(place, mask=on, other=float("-inf")) - row_base) * row_factor
        if shift == 0:
            part = tl.load(place + 1, mask=on, other=0.0)
            part -= tl.load(place + 2, mask=on, other=0.0)
            part -= tl.load(place + 3, mask=on, other=0.0)
        elif shift == 1:
            part = tl.load(place + 2, mask=on, other=0.0)
        else:
            part = tl.load(place + 3, mask=on, other=0.0)
        slash += part * weight
    index = tl.program_id(0) * TILE + tl.arange(0, TILE)
    inside = index < num_kv_blocks
    out = lines + head * num_kv_blocks + index
    wanted = candidates + batch * candidates_stride_batch + index
    in_vertical = tl.load(wanted, mask=inside, other=0) != 0
    in_slash = tl.load(wanted + candidates_stride, mask=inside, other=0) != 0
    tl.store(out, tl.where(in_vertical, vertical / num_taken, -1.0), mask=inside)
    tl.store(out + lines_stride, tl.where(in_slash, tl.sum(slash, 1) / num_taken, -1.0), mask=inside)


def line_attention(sums: BlockSums, norms: RowNorms, rows: Tensor, candidates: Tensor) -> Tensor:
    """V by key block and S by block diagonal, (2, batch, num_heads, num_kv_blocks) float32 (see `flexmask.representative`).

    `candidates` is (2, batch or 1, num_kv_blocks) int32: nonzero for key blocks and block diagonals that some row sees; others
    get -1.
    """
    batch, num_heads, blocks, block_size, _ = sums.blocks.shape
    lines = sums.blocks.new_empty((2, batch, num_heads, blocks))
    _lines_kernel[(triton.cdiv(blocks, _LINES_PER_PROGRAM), batch * num_heads)](
        sums.blocks,
        norms.base,
        norms.factor,
        rows,
        candidates,
        lines,
        1 + block_size if rows.shape[0] > 1 else 0,
        candidates.shape[1] * blocks,
        blocks if candidates.shape[1] > 1 else 0,
        num_heads,
        blocks,
        batch * num_heads * blocks,
        BLOCK_SIZE=block_size,
        PADDED_SIZE=1 << (block_size - 1).bit_length(),
        TILE=_LINES_PER_PROGRAM,
    )
    return lines


@triton.jit
def _estimate_kernel(
    query,  # (batch, num_heads, q_len, head_dim), any strides
    key_means,  # (batch, num_kv_heads, num_kv_blocks, head_dim) float32
    rows,  # (batch or 1, 1 + block_size) int32, as above
    last_valid_key,  # (batch or 1, num_kv_blocks) int32
    estimate,  # (batch, num_heads, num_kv_blocks) float32
    rows_stride,
    keys_stride,
    query_stride_batch,
    query_stride_head,
    query_stride_token,
    query_stride_dim,
    num_heads,
    num_kv_blocks,
    far,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    GROUPS: tl.constexpr,
    TILE: tl.constexpr,
):
    head = tl.program_id(1).to(tl.int64)
    batch = head // num_heads
    dims = tl.arange(0, PADDED_DIM)
    queries = query + batch * query_stride_batch + (head % num_heads) * query_stride_head
    block = tl.program_id(0) * TILE + tl.arange(0, TILE)
    last_key = tl.load(last_valid_key + batch * keys_stride + block, mask=block < num_kv_blocks, other=0)[:, None]
    first_position = tl.load(rows + batch * rows_stride)
    total = tl.zeros([PADDED_DIM], tl.float32)
    seen = tl.zeros([TILE], tl.int32)
    num_taken = 0
    for start in tl.static_range(0, BLOCK_SIZE, ROWS):
        row = tl.load(rows + batch * rows_stride + 1 + start + tl.arange(0, ROWS))
        place = queries + row[:, None].to(tl.int64) * query_stride_token + dims[None, :] * query_stride_dim
        q = tl.load(place, mask=(row >= 0)[:, None] & (dims < HEAD_DIM)[None, :], other=0.0)
        total += tl.sum(q.to(tl.float32), 0)
        num_taken += tl.sum((row >= 0).to(tl.int32), 0)
        # a row sees its own key, and an earlier key block by its last valid key
        position = (first_position + row)[None, :]
        own = position // BLOCK_SIZE
        sees = (block[:, None] == own) | ((block[:, None] < own) & (position - last_key < far))
        seen = tl.maximum(seen, tl.max((sees & (row >= 0)[None, :]).to(tl.int32), 1))
    mean = total / tl.maximum(num_taken, 1).to(tl.float32)
    key_head = batch * (num_heads // GROUPS) + (head % num_heads) // GROUPS
    place = key_means + (key_head * num_kv_blocks + block)[:, None] * HEAD_DIM + dims[None, :]
    k = tl.load(place, mask=(block < num_kv_blocks)[:, None] & (dims < HEAD_DIM)[None, :], other=0.0)
    score = tl.where(seen != 0, tl.sum(k * mean[None, :], 1), float("-inf"))
    tl.store(estimate + head * num_kv_blocks + block, score, mask=block < num_kv_blocks)


def estimated_scores(
    query: Tensor, key_means: Tensor, rows: Tensor, last_valid_key: Tensor, kv_len: int, block_size: int, window: int | None
) -> Tensor:
    """Unscaled scores of the mean representative row with the mean of each key block, (batch, num_heads, num_kv_blocks) float32.

    -inf for key blocks of which no representative row sees anything. `last_valid_key` is (batch or 1, num_kv_blocks) int32 as in
    `BlockEdges`; `key_means` is (batch, num_kv_heads, num_kv_blocks, head_dim) float32; `rows` as in `block_sums`.
    """
    batch, num_heads, _, head_dim = query.shape
    num_kv_heads, blocks = key_means.shape[1], key_means.shape[2]
    estimate = key_means.new_empty((batch, num_heads, blocks))
    _estimate_kernel[(triton.cdiv(blocks, 32), batch * num_heads)](
        query,
        key_means,
        rows,
        last_valid_key,
        estimate,
        1 + block_size if rows.shape[0] > 1 else 0,
        blocks if last_valid_key.shape[0] > 1 else 0,
        *query.stride(),
        num_heads,
        blocks,
        kv_len if window is None else min(window, kv_len),
        HEAD_DIM=head_dim,
        PADDED_DIM=max(16, 1 << (head_dim - 1).bit_length()),
        BLOCK_SIZE=block_size,
        ROWS=min(64, block_size & -block_size),
        GROUPS=num_heads // num_kv_heads,
        TILE=32,
    )
    return estimate
