"""Triton kernels for the representative attention: one pass over the keys, nothing of size [rows, kv_len] written."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from flexmask.base.blocks import BlockProblem
from flexmask.base.visibility import num_blocks
from flexmask.kernels.launch import cdiv, kernel, next_power_of_2, soft_capped
from flexmask.kernels.visibility import SUBSETS

# key blocks of a program; half as many where there would be fewer programs than these
_BLOCKS_PER_PROGRAM = 16
_FEW_PROGRAMS = 256
# bytes of shared memory per program on consumer GPUs (compute capability 8.6, 8.9, 12.0)
_SHARED_MEMORY = 101_376


class RepresentativeSums(NamedTuple):
    """Sums that give the attention of the representative rows by key block (`RepresentativeMass` in `flexmask.plain`).

    A row's softmax is ``exp2(score - base) * factor``.
    """

    rows: Tensor  # (batch, 1 + block_size) int32: a plane of `KernelGeometry.representative`
    # (batch, num_heads, num_kv_blocks, block_size, 4) float32: the peak of the scores, -inf where the row sees nothing of the
    # block; the sum of exp2(score - peak); the sum weighted by how far the row's phase leads the key's (after), and by how far it
    # trails it (before). Without diagonals the first two
    sums: Tensor
    norms: Tensor  # (batch, num_heads, block_size, 2) float32: base and factor; the factor of rows not taken is 0


@kernel
def _block_sums_kernel(
    query, key, representative,
    mask,  # (batch, kv_len) bool, read if HAS_ATTENTION_MASK
    sums,
    chunks,  # (batch, num_heads, num_chunks, block_size, 2) float32, by chunk of key blocks: peak and plain sum
    query_stride_batch, query_stride_head, query_stride_token, query_stride_dim, key_stride_batch, key_stride_head,
    key_stride_token, key_stride_dim, num_kv_heads, q_len, kv_len, num_kv_blocks, scale, softcap, distance_limit,
    blocks_per_program,
    HEAD_DIM: tl.constexpr, PADDED_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr, KEYS: tl.constexpr,
    QUERIES_PER_KV: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_ATTENTION_MASK: tl.constexpr,
    HAS_DIAGONALS: tl.constexpr, ONE_STORE: tl.constexpr,
):  # fmt: skip
    # the interpreter passes Python's floats as they are
    scale = tl.cast(scale, tl.float32)
    softcap = tl.cast(softcap, tl.float32)
    to_log2 = 1.4426950408889634 if HAS_SOFTCAP else scale * 1.4426950408889634
    # the query heads of a KV head are neighbours in the grid and share keys in the L2 cache
    TILES: tl.constexpr = BLOCK_SIZE // TILE
    head_of_key = tl.program_id(0) // TILES
    row_tile = tl.program_id(0) % TILES
    batch = tl.program_id(2) // num_kv_heads
    kv_head = tl.program_id(2) % num_kv_heads
    q_head = kv_head * QUERIES_PER_KV + head_of_key
    head = (batch * num_kv_heads * QUERIES_PER_KV + q_head).to(tl.int64)

    o_slot = row_tile * TILE + tl.arange(0, TILE)
    o_dim = tl.arange(0, PADDED_DIM)
    o_row = tl.load(representative + batch * (1 + BLOCK_SIZE) + 1 + o_slot)
    m_row = o_row >= 0
    first_position = tl.load(representative + batch * (1 + BLOCK_SIZE))
    b_position = first_position + o_row
    filled_end = first_position + q_len
    b_row_phase = (b_position % BLOCK_SIZE).to(tl.float32)
    lowest_row = tl.min(o_row, 0)
    some_not_taken = lowest_row < 0
    lowest_position = first_position + lowest_row
    p_query = query + batch.to(tl.int64) * query_stride_batch + q_head.to(tl.int64) * query_stride_head
    b_q = tl.load(
        p_query + o_row[:, None].to(tl.int64) * query_stride_token + o_dim[None, :].to(tl.int64) * query_stride_dim,
        mask=m_row[:, None] & (o_dim[None, :] < HEAD_DIM),
        other=0.0,
    )
    p_key = key + batch.to(tl.int64) * key_stride_batch + kv_head.to(tl.int64) * key_stride_head

    first_block = tl.program_id(1) * blocks_per_program
    b_chunk_highest = tl.full([TILE], float("-inf"), tl.float32)
    b_chunk_total = tl.zeros([TILE], tl.float32)
    for block in range(first_block, tl.minimum(first_block + blocks_per_program, num_kv_blocks)):
        b_max = tl.full([TILE], float("-inf"), tl.float32)
        b_total = tl.zeros([TILE], tl.float32)
        b_by_phase = tl.zeros([TILE], tl.float32)
        b_after = tl.zeros([TILE], tl.float32)
        for start in tl.static_range(0, BLOCK_SIZE, KEYS):
            o_phase = start + tl.arange(0, KEYS)
            o_key = block * BLOCK_SIZE + o_phase
            b_k = tl.load(
                p_key + o_key[None, :].to(tl.int64) * key_stride_token + o_dim[:, None].to(tl.int64) * key_stride_dim,
                mask=(o_key[None, :] < kv_len) & (o_dim[:, None] < HEAD_DIM),
                other=0.0,
            )
            b_score = tl.dot(b_q, b_k, input_precision="ieee")
            if HAS_SOFTCAP:
                b_score = soft_capped(b_score * scale, softcap)
            if ((block + 1) * BLOCK_SIZE > lowest_position) | some_not_taken | HAS_ATTENTION_MASK | HAS_WINDOW:
                # drops NaN in invalid keys too
                b_distance = b_position[:, None] - o_key[None, :]
                m_visible = (b_distance >= 0) & (o_key < filled_end)[None, :] & m_row[:, None]
                if HAS_WINDOW:
                    m_visible = m_visible & (b_distance < distance_limit)
                if HAS_ATTENTION_MASK:
                    m_valid = tl.load(mask + batch.to(tl.int64) * kv_len + o_key, mask=o_key < kv_len, other=0) != 0
                    m_visible = m_visible & m_valid[None, :]
                b_score = tl.where(m_visible, b_score, float("-inf"))
            b_new_max = tl.maximum(b_max, tl.max(b_score, 1) * to_log2)
            b_base = tl.where(b_new_max == float("-inf"), 0.0, b_new_max)
            b_rescale = tl.exp2(b_max - b_base)
            b_weight = tl.exp2(b_score * to_log2 - b_base[:, None])
            b_total = b_total * b_rescale + tl.sum(b_weight, 1)
            if HAS_DIAGONALS:
                b_phase = o_phase[None, :].to(tl.float32)
                b_by_phase = b_by_phase * b_rescale + tl.sum(b_weight * b_phase, 1)
                b_after = b_after * b_rescale + tl.sum(b_weight * tl.maximum(b_row_phase[:, None] - b_phase, 0.0), 1)
            b_max = b_new_max
        NUM_SUMS: tl.constexpr = 4 if HAS_DIAGONALS else 2
        o_sums = ((head * num_kv_blocks + block) * BLOCK_SIZE + o_slot) * NUM_SUMS
        # one store of all sums: each of several would convert the layout
        if not ONE_STORE:
            tl.store(sums + o_sums, b_max)
            tl.store(sums + o_sums + 1, b_total)
        elif not HAS_DIAGONALS:
            tl.store(sums + o_sums[:, None] + tl.arange(0, 2)[None, :], tl.join(b_max, b_total))
        if HAS_DIAGONALS:
            # the mean lead is after - before
            b_before = tl.maximum(b_after - (b_row_phase * b_total - b_by_phase), 0.0)
            if ONE_STORE:
                b_four = tl.join(tl.join(b_max, b_after / BLOCK_SIZE), tl.join(b_total, b_before / BLOCK_SIZE))
                o_four = o_sums[:, None, None] + 2 * tl.arange(0, 2)[None, :, None] + tl.arange(0, 2)[None, None, :]
                tl.store(sums + o_four, b_four)
            else:
                tl.store(sums + o_sums + 2, b_after / BLOCK_SIZE)
                tl.store(sums + o_sums + 3, b_before / BLOCK_SIZE)
        b_new_max = tl.maximum(b_chunk_highest, b_max)
        b_base = tl.where(b_new_max == float("-inf"), 0.0, b_new_max)
        b_chunk_total = b_chunk_total * tl.exp2(b_chunk_highest - b_base) + b_total * tl.exp2(b_max - b_base)
        b_chunk_highest = b_new_max
    o_chunks = ((head * tl.num_programs(1) + tl.program_id(1)) * BLOCK_SIZE + o_slot) * 2
    if ONE_STORE:
        tl.store(chunks + o_chunks[:, None] + tl.arange(0, 2)[None, :], tl.join(b_chunk_highest, b_chunk_total))
    else:
        tl.store(chunks + o_chunks, b_chunk_highest)
        tl.store(chunks + o_chunks + 1, b_chunk_total)


@kernel
def _row_norms_kernel(chunks, norms, num_chunks, ROWS: tl.constexpr, TILE: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    head = tl.program_id(1).to(tl.int64)
    o_slot = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    b_max = tl.full([ROWS], float("-inf"), tl.float32)
    b_total = tl.zeros([ROWS], tl.float32)
    for start in range(0, num_chunks, TILE):
        o_chunk = start + tl.arange(0, TILE)
        p_chunks = chunks + ((head * num_chunks + o_chunk[:, None]) * BLOCK_SIZE + o_slot[None, :]) * 2
        m_chunk = (o_chunk < num_chunks)[:, None]
        b_peaks = tl.load(p_chunks, mask=m_chunk, other=float("-inf"))
        b_new_max = tl.maximum(b_max, tl.max(b_peaks, 0))
        b_base = tl.where(b_new_max == float("-inf"), 0.0, b_new_max)
        b_weight = tl.exp2(b_peaks - b_base[None, :])
        b_total = b_total * tl.exp2(b_max - b_base) + tl.sum(tl.load(p_chunks + 1, mask=m_chunk, other=0.0) * b_weight, 0)
        b_max = b_new_max
    p_norms = norms + (head * BLOCK_SIZE + o_slot) * 2
    tl.store(p_norms, tl.where(b_max == float("-inf"), 0.0, b_max))
    tl.store(p_norms + 1, tl.where(b_total == 0, 0.0, 1.0 / tl.where(b_total == 0, 1.0, b_total)))


def _tiles(head_dim: int, itemsize: int, block_size: int) -> tuple[int, int]:
    """Rows and keys at a time: as many as registers and shared memory hold."""
    if itemsize > 2:
        rows, keys = (32, 32) if head_dim <= 256 else (16, 16)
    elif head_dim <= 128:
        rows, keys = 128, 64
    elif torch.version.hip is not None:
        rows, keys = 32, 32
    else:
        rows, keys = (128, 64) if head_dim <= 256 else (64, 32)
    rows = min(rows, block_size & -block_size)
    return rows, min(keys, rows)


def _pipeline_stages(block_size: int, tile: int, row_bytes: int, device: torch.device) -> int:
    """Stages of the loop over key blocks, as many as fit into shared memory: all but one buffer a block of keys."""
    if torch.version.hip is not None:
        return 1  # 64 KiB of shared memory
    tile_bytes, block_bytes = 2048 + tile * row_bytes, block_size * row_bytes
    if tile_bytes + block_bytes <= _SHARED_MEMORY:
        return 3 if tile_bytes + 2 * block_bytes <= _SHARED_MEMORY else 2
    # Hopper's products read shared memory: two stages take two blocks
    return 2 if tile_bytes + 2 * block_bytes <= _shared_memory(device) else 1


@functools.cache
def _shared_memory(device: torch.device) -> int:
    """Bytes per program on Hopper, where two stages were compiled and run; elsewhere those of the smallest GPUs."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device)[0] != 9:
        return _SHARED_MEMORY
    return int(getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", _SHARED_MEMORY))


def representative_mass(problem: BlockProblem, subset: str, with_diagonals: bool = True) -> RepresentativeSums:
    """As `flexmask.plain.representative_mass`; without diagonals, half of the sums."""
    inputs, block_size, rows = problem.inputs, problem.block_size, problem.kernel_geometry.representative[SUBSETS.index(subset)]
    query, key, mask, softcap = inputs.query, inputs.key, inputs.attention_mask, inputs.softcap
    batch, num_heads, q_len, head_dim = query.shape
    num_kv_heads, kv_len = key.shape[1], key.shape[2]
    blocks = num_blocks(kv_len, block_size)
    tile, keys = _tiles(head_dim, query.element_size(), block_size)
    queries_per_kv = num_heads // num_kv_heads
    sums = query.new_empty((batch, num_heads, blocks, block_size, 4 if with_diagonals else 2), dtype=torch.float32)
    is_small = batch * num_heads * blocks < _FEW_PROGRAMS * _BLOCKS_PER_PROGRAM
    blocks_per_program = _BLOCKS_PER_PROGRAM // 2 if is_small else _BLOCKS_PER_PROGRAM
    num_chunks = cdiv(blocks, blocks_per_program)
    chunks = query.new_empty((batch, num_heads, num_chunks, block_size, 2), dtype=torch.float32)
    padded_dim = max(16, next_power_of_2(head_dim))
    grid = (queries_per_kv * (block_size // tile), num_chunks, batch * num_kv_heads)
    _block_sums_kernel[grid](
        query, key, rows, rows if mask is None else mask, sums, chunks,
        *query.stride(), *key.stride(), num_kv_heads, q_len, kv_len, blocks,
        inputs.scale, 1.0 if softcap is None else softcap, inputs.distance_limit, blocks_per_program,
        HEAD_DIM=head_dim, PADDED_DIM=padded_dim, BLOCK_SIZE=block_size, TILE=tile, KEYS=keys, QUERIES_PER_KV=queries_per_kv,
        HAS_SOFTCAP=softcap is not None, HAS_WINDOW=inputs.window is not None, HAS_ATTENTION_MASK=mask is not None,
        HAS_DIAGONALS=with_diagonals,
        # on RDNA GPUs Triton cannot convert layouts of products to that of joined values
        ONE_STORE=torch.version.hip is None, num_warps=8 if tile == 128 else 4,
        num_stages=_pipeline_stages(block_size, tile, padded_dim * query.element_size(), query.device),
    )  # fmt: skip
    norms = chunks.new_empty((batch, num_heads, block_size, 2))
    _row_norms_kernel[(block_size // 16, batch * num_heads)](chunks, norms, num_chunks, ROWS=16, TILE=32, BLOCK_SIZE=block_size)
    return RepresentativeSums(rows, sums, norms)
