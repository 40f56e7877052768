"""Triton kernel for the row evidence of hybrid selection: query blocks and heads that share key means, in a program."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from flexmask.base.blocks import BlockProblem
from flexmask.block_masks.hybrid.plain import mean_and_least
from flexmask.kernels.launch import cdiv, kernel, next_power_of_2, soft_capped
from flexmask.kernels.visibility import kv_edges_of, num_valid_keys_of, q_edges_of

# query rows of a program and their bytes, and bytes of a tile of key means that three stages hold: shared memory of consumer GPUs
_ROWS = 128
_QUERY_BYTES = 32 * 1024
_TILE_BYTES = 16 * 1024
# query blocks, and key blocks at a time
_Q_BLOCKS = 4
_COLUMNS = 32


@triton.jit
def _scores(
    b_q, means, first_kv, p_last_valid_key, p_count, b_position, m_row, o_dim, num_kv_blocks, distance_limit, scale, to_log2,
    softcap, IS_EDGE: tl.constexpr, COLUMNS: tl.constexpr, HEAD_DIM: tl.constexpr, PADDED_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, HAS_SOFTCAP: tl.constexpr, MEAN_PARTS: tl.constexpr, HAS_TF32: tl.constexpr,
):  # fmt: skip
    """Scores of rows with the means of COLUMNS key blocks, which `to_log2` takes to powers of two, and the key blocks.

    With IS_EDGE they hold the logarithm of the valid share of keys, -inf where unseen; else every row sees every key.
    """
    o_kv = first_kv + tl.arange(0, COLUMNS)
    # the high and low parts of a mean are neighbours: one product of both
    o_part = (first_kv * MEAN_PARTS + tl.arange(0, COLUMNS * MEAN_PARTS))[None, :]
    p_means = means + o_part * HEAD_DIM + o_dim[:, None]
    if IS_EDGE or HEAD_DIM != PADDED_DIM:
        b_k = tl.load(p_means, mask=(o_part < num_kv_blocks * MEAN_PARTS) & (o_dim < HEAD_DIM)[:, None], other=0.0)
    else:
        b_k = tl.load(p_means)
    b_score = tl.dot(b_q, b_k, input_precision="tf32x3" if HAS_TF32 else "ieee")
    if MEAN_PARTS == 2:
        b_score = tl.sum(tl.reshape(b_score, (b_score.shape[0], COLUMNS, 2)), 2)
    if HAS_SOFTCAP:
        b_score = soft_capped(b_score * scale, softcap)
    if IS_EDGE:
        m_kv = o_kv < num_kv_blocks
        b_count = tl.maximum(tl.load(p_count + o_kv, mask=m_kv, other=0), 1).to(tl.float32)
        b_score += (tl.log2(b_count / BLOCK_SIZE) / to_log2)[None, :]
        b_last_valid_key = tl.load(p_last_valid_key + o_kv, mask=m_kv, other=0)[None, :]
        b_own = (b_position // BLOCK_SIZE)[:, None]
        m_reached = b_position[:, None] - b_last_valid_key < distance_limit
        m_visible = (o_kv[None, :] == b_own) | ((o_kv[None, :] < b_own) & m_reached)
        b_score = tl.where(m_visible & m_row[:, None] & m_kv[None, :], b_score, float("-inf"))
    return b_score, o_kv


@kernel
def _evidence_kernel(
    query,
    means,  # from split_key_means
    mask,  # (batch, kv_len) bool, read if HAS_ATTENTION_MASK
    q_edges, kv_edges,
    squares,  # map, float32, written unless MEASURE: sums over sampled rows, in blocks that one of a program's rows may see
    num_sampled,  # (batch, num_heads, num_q_blocks) int32, written unless MEASURE: sampled rows
    keep,  # bool, read if MEASURE
    in_kept,  # (batch, num_heads, num_q_blocks) float32, written if MEASURE: attention in kept blocks; -1 without rows
    query_stride_batch, query_stride_head, query_stride_token, query_stride_dim, num_kv_heads, q_len, kv_len, num_q_blocks,
    num_kv_blocks, distance_limit, scale, softcap,
    HEAD_DIM: tl.constexpr, PADDED_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, ROW_STRIDE: tl.constexpr,
    QUERIES_PER_KV: tl.constexpr, HEADS: tl.constexpr, Q_BLOCKS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    STAGES: tl.constexpr, HAS_SOFTCAP: tl.constexpr, MEAN_PARTS: tl.constexpr, HAS_TF32: tl.constexpr,
    HAS_ATTENTION_MASK: tl.constexpr, MEASURE: tl.constexpr,
):  # fmt: skip
    # the interpreter passes Python's floats as they are
    scale = tl.cast(scale, tl.float32)
    softcap = tl.cast(softcap, tl.float32)
    to_log2 = 1.4426950408889634 if HAS_SOFTCAP else scale * 1.4426950408889634
    PARTS: tl.constexpr = (QUERIES_PER_KV + HEADS - 1) // HEADS
    MAP_ROWS: tl.constexpr = Q_BLOCKS * HEADS
    # long rows first
    first_q_block = (tl.num_programs(0) - 1 - tl.program_id(0)) * Q_BLOCKS
    kv_head = (tl.program_id(1) // PARTS).to(tl.int64)
    first_head_of_key = (tl.program_id(1) % PARTS) * HEADS
    batch = kv_head // num_kv_heads
    p_q_edges = q_edges_of(q_edges, batch, num_q_blocks)
    p_kv_edges = kv_edges_of(kv_edges, batch, num_kv_blocks)
    p_means = means + kv_head * num_kv_blocks * MEAN_PARTS * HEAD_DIM

    # rows: query blocks, heads, sampled rows
    o_lane = tl.arange(0, MAP_ROWS * ROWS)
    o_dim = tl.arange(0, PADDED_DIM)
    o_q_of_row = first_q_block + o_lane // (ROWS * HEADS)
    o_head_of_row = first_head_of_key + (o_lane // ROWS) % HEADS
    o_slot = (o_lane % ROWS) * ROW_STRIDE
    o_row = o_q_of_row * BLOCK_SIZE + o_slot
    m_row = (o_slot < BLOCK_SIZE) & (o_row < q_len) & (o_head_of_row < QUERIES_PER_KV)
    b_position = tl.load(p_q_edges + num_q_blocks + o_q_of_row, mask=m_row, other=0) + o_slot
    if HAS_ATTENTION_MASK:
        m_row = m_row & (tl.load(mask + batch * kv_len + b_position, mask=m_row, other=0) != 0)
    p_query = query + batch * query_stride_batch
    p_query += ((kv_head % num_kv_heads) * QUERIES_PER_KV + o_head_of_row)[:, None] * query_stride_head
    p_query += o_row[:, None].to(tl.int64) * query_stride_token + o_dim[None, :].to(tl.int64) * query_stride_dim
    b_q = tl.load(p_query, mask=m_row[:, None] & (o_dim < HEAD_DIM)[None, :], other=0.0)

    # map rows: query blocks, heads
    o_map_row = tl.arange(0, MAP_ROWS)
    o_q = first_q_block + o_map_row // HEADS
    o_head = first_head_of_key + o_map_row % HEADS
    m_map_row = (o_q < num_q_blocks) & (o_head < QUERIES_PER_KV)
    b_num_sampled = tl.sum(tl.reshape(m_row.to(tl.int32), (MAP_ROWS, ROWS)), 1)
    b_end = tl.where(m_map_row, tl.load(p_q_edges + o_q, mask=m_map_row, other=0) // BLOCK_SIZE + 1, 0)
    o_out = (kv_head * QUERIES_PER_KV + o_head) * num_q_blocks + o_q
    first_row = tl.load(p_q_edges + num_q_blocks + first_q_block)
    last_row = first_row + Q_BLOCKS * BLOCK_SIZE - 1
    begin = tl.maximum(first_row - distance_limit, 0) // BLOCK_SIZE
    tiles = tl.cdiv(tl.max(b_end, 0) - begin, COLUMNS)
    # inner tiles: key blocks that are whole, before every row and in every row's window
    whole_end = first_row // BLOCK_SIZE
    if HAS_ATTENTION_MASK | (tl.min((m_row | (o_head_of_row >= QUERIES_PER_KV)).to(tl.int32), 0) == 0):
        whole_end = 0
    whole_begin = tl.cdiv(tl.maximum(last_row - distance_limit + 1, 0), BLOCK_SIZE)
    first_inner = tl.minimum(tl.cdiv(tl.maximum(whole_begin - begin, 0), COLUMNS), tiles)
    inner_tiles = tl.maximum(whole_end - begin - first_inner * COLUMNS, 0) // COLUMNS

    b_max = tl.full([MAP_ROWS * ROWS], float("-inf"), tl.float32)
    b_total = tl.zeros([MAP_ROWS * ROWS], tl.float32)
    b_in_kept = tl.zeros([MAP_ROWS], tl.float32)
    # squares, or the shares themselves
    POWER: tl.constexpr = 1 if MEASURE else 2
    # computing the products again is cheaper than storing the scores
    for is_second in tl.static_range(2):
        b_base = tl.where(b_max == float("-inf"), 0.0, b_max * to_log2)
        b_log_total = b_base + tl.log2(tl.where(b_total == 0, 1.0, b_total))
        for is_edge in tl.static_range(2):
            for tile in tl.range(0, tiles - inner_tiles if is_edge else inner_tiles, num_stages=1 if is_edge else STAGES):
                index = tile + tl.where(tile < first_inner, 0, inner_tiles) if is_edge else tile + first_inner
                b_score, o_kv = _scores(
                    b_q, p_means, begin + index * COLUMNS, p_kv_edges, num_valid_keys_of(p_kv_edges, num_kv_blocks), b_position,
                    m_row, o_dim, num_kv_blocks, distance_limit, scale, to_log2, softcap, IS_EDGE=is_edge, COLUMNS=COLUMNS,
                    HEAD_DIM=HEAD_DIM, PADDED_DIM=PADDED_DIM, BLOCK_SIZE=BLOCK_SIZE, HAS_SOFTCAP=HAS_SOFTCAP,
                    MEAN_PARTS=MEAN_PARTS, HAS_TF32=HAS_TF32,
                )  # fmt: skip
                if is_second:
                    b_p = tl.exp2(b_score * (POWER * to_log2) - (POWER * b_log_total)[:, None])
                    b_by_map_row = tl.sum(tl.reshape(b_p, (MAP_ROWS, ROWS, COLUMNS)), 1)
                    m_kv = (o_kv[None, :] < b_end[:, None]) & m_map_row[:, None]
                    o_map = o_out[:, None] * num_kv_blocks + o_kv[None, :]
                    if MEASURE:
                        b_in_kept += tl.sum(tl.where(tl.load(keep + o_map, mask=m_kv, other=0) != 0, b_by_map_row, 0.0), 1)
                    else:
                        tl.store(squares + o_map, b_by_map_row, mask=m_kv)
                else:
                    b_new_max = tl.maximum(b_max, tl.max(b_score, 1))
                    b_new_base = tl.where(b_new_max == float("-inf"), 0.0, b_new_max * to_log2)
                    b_total = b_total * tl.exp2(b_max * to_log2 - b_new_base)
                    b_total += tl.sum(tl.exp2(b_score * to_log2 - b_new_base[:, None]), 1)
                    b_max = b_new_max
    if MEASURE:
        b_mean = tl.where(b_num_sampled > 0, b_in_kept / tl.maximum(b_num_sampled, 1).to(tl.float32), -1.0)
        tl.store(in_kept + o_out, b_mean, mask=m_map_row)
    else:
        tl.store(num_sampled + o_out, b_num_sampled, mask=m_map_row)


def squares_of_shares(problem: BlockProblem, means: Tensor, row_stride: int) -> tuple[Tensor, Tensor]:
    """Sums of the sampled rows' squared attention, a map in float32, and the number of these rows, int32.

    The map is written where these rows may see. `means` are of keys, from `split_key_means`.
    """
    batch, num_heads, _, _ = problem.inputs.query.shape
    num_sampled = means.new_empty((batch, num_heads, problem.kernel_geometry.q_edges.shape[2]), dtype=torch.int32)
    squares = means.new_empty((*num_sampled.shape, means.shape[2]), dtype=torch.float32)
    _launch(problem, means, row_stride, squares=squares, num_sampled=num_sampled)
    return squares, num_sampled


def row_coverage(problem: BlockProblem, means: Tensor, row_stride: int, keep: Tensor) -> tuple[Tensor, Tensor]:
    """As `flexmask.block_masks.hybrid.plain.row_coverage`."""
    in_kept = means.new_empty(keep.shape[:3], dtype=torch.float32)
    _launch(problem, means, row_stride, keep=keep, in_kept=in_kept)
    return mean_and_least(problem, in_kept, in_kept != -1)


def _launch(problem: BlockProblem, means: Tensor, row_stride: int, **tensors: Tensor) -> None:
    inputs, geometry, block_size = problem.inputs, problem.kernel_geometry, problem.block_size
    query, mask, softcap = inputs.query, inputs.attention_mask, inputs.softcap
    batch, num_heads, q_len, head_dim = query.shape
    num_kv_heads, num_kv_blocks = means.shape[1:3]
    num_q_blocks, queries_per_kv = geometry.q_edges.shape[2], num_heads // num_kv_heads
    samples = next_power_of_2(block_size // row_stride)
    padded_dim = max(16, next_power_of_2(head_dim))
    # as many rows as fit into shared memory
    most = min(_ROWS, _QUERY_BYTES // (padded_dim * query.element_size()))
    heads = min(next_power_of_2(queries_per_kv), max(1, most // samples))
    q_blocks = max(1, min(_Q_BLOCKS, most // (samples * heads)))
    rows = max(samples, 16 // (heads * q_blocks))
    mean_parts = means.shape[3]
    columns = _COLUMNS if padded_dim <= 256 else _COLUMNS // 2
    tile_bytes = columns * mean_parts * padded_dim * query.element_size()
    stages = 3 if tile_bytes <= _TILE_BYTES else 2 if tile_bytes <= 2 * _TILE_BYTES else 1
    any_tensor = geometry.q_edges  # for arguments that a variant does not read
    _evidence_kernel[(cdiv(num_q_blocks, q_blocks), batch * num_kv_heads * cdiv(queries_per_kv, heads))](
        query, means, any_tensor if mask is None else mask, geometry.q_edges, geometry.kv_edges,
        *(tensors.get(name, any_tensor) for name in ("squares", "num_sampled", "keep", "in_kept")),
        *query.stride(), num_kv_heads, q_len, inputs.key.shape[2], num_q_blocks, num_kv_blocks, inputs.distance_limit,
        inputs.scale, 1.0 if softcap is None else softcap,
        HEAD_DIM=head_dim, PADDED_DIM=padded_dim, BLOCK_SIZE=block_size, ROW_STRIDE=row_stride, QUERIES_PER_KV=queries_per_kv,
        HEADS=heads, Q_BLOCKS=q_blocks, ROWS=rows, COLUMNS=columns, STAGES=stages,
        HAS_SOFTCAP=softcap is not None, MEAN_PARTS=mean_parts,
        # three products in TF32 are as exact as one in float32, and faster; not on AMD
        HAS_TF32=torch.version.hip is None, HAS_ATTENTION_MASK=mask is not None, MEASURE="in_kept" in tensors,
        num_warps=8 if heads * q_blocks * rows >= _ROWS else 4, num_stages=stages,
    )  # fmt: skip
