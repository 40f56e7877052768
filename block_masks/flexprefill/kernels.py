"""The steps of FlexPrefill as Triton kernels: pattern and lines here, query-aware blocks in `pooled_map_kernel`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from flexmask.base.blocks import BlockProblem, FloatOption
from flexmask.block_masks.flexprefill.pooled_map_kernel import query_aware_blocks as query_aware_blocks
from flexmask.block_masks.flexprefill.top_p_kernel import keep_top_p
from flexmask.kernels.launch import cdiv, kernel, next_power_of_2, soft_capped
from flexmask.kernels.representative import RepresentativeSums
from flexmask.kernels.vertical_slash import line_mass
from flexmask.kernels.visibility import kv_edges_of, num_valid_keys_of


@kernel
def _estimate_kernel(
    query,
    key_means,  # float32
    representative, kv_edges,
    estimate,  # (batch, num_heads, num_kv_blocks) float32
    query_stride_batch, query_stride_head, query_stride_token, query_stride_dim, num_heads, num_kv_blocks, distance_limit,
    HEAD_DIM: tl.constexpr, PADDED_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, ROWS: tl.constexpr, QUERIES_PER_KV: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1).to(tl.int64)
    batch = head // num_heads
    o_dim = tl.arange(0, PADDED_DIM)
    p_query = query + batch * query_stride_batch + (head % num_heads) * query_stride_head
    o_kv = tl.program_id(0) * TILE + tl.arange(0, TILE)
    b_last_key = tl.load(kv_edges_of(kv_edges, batch, num_kv_blocks) + o_kv, mask=o_kv < num_kv_blocks, other=0)[:, None]
    first_position = tl.load(representative + batch * (1 + BLOCK_SIZE))
    b_total = tl.zeros([PADDED_DIM], tl.float32)
    b_seen = tl.zeros([TILE], tl.int32)
    num_rows = 0
    for start in tl.static_range(0, BLOCK_SIZE, ROWS):
        o_row = tl.load(representative + batch * (1 + BLOCK_SIZE) + 1 + start + tl.arange(0, ROWS))
        p_q = p_query + o_row[:, None].to(tl.int64) * query_stride_token + o_dim[None, :].to(tl.int64) * query_stride_dim
        b_q = tl.load(p_q, mask=(o_row >= 0)[:, None] & (o_dim < HEAD_DIM)[None, :], other=0.0)
        b_total += tl.sum(b_q.to(tl.float32), 0)
        num_rows += tl.sum((o_row >= 0).to(tl.int32), 0)
        # the rule of blocks_seen_by_rows
        b_position = (first_position + o_row)[None, :]
        b_own = b_position // BLOCK_SIZE
        m_visible = (o_kv[:, None] == b_own) | ((o_kv[:, None] < b_own) & (b_position - b_last_key < distance_limit))
        b_seen = tl.maximum(b_seen, tl.max((m_visible & (o_row >= 0)[None, :]).to(tl.int32), 1))
    b_mean = b_total / tl.maximum(num_rows, 1).to(tl.float32)
    kv_head = batch * (num_heads // QUERIES_PER_KV) + (head % num_heads) // QUERIES_PER_KV
    p_k = key_means + (kv_head * num_kv_blocks + o_kv)[:, None] * HEAD_DIM + o_dim[None, :]
    b_k = tl.load(p_k, mask=(o_kv < num_kv_blocks)[:, None] & (o_dim < HEAD_DIM)[None, :], other=0.0)
    b_score = tl.where(b_seen != 0, tl.sum(b_k * b_mean[None, :], 1), float("-inf"))
    tl.store(estimate + head * num_kv_blocks + o_kv, b_score, mask=o_kv < num_kv_blocks)


def estimated_scores(problem: BlockProblem, key_means: Tensor, representative: Tensor) -> Tensor:
    """Unscaled scores of the mean representative row with `key_means`, (batch, num_heads, num_kv_blocks); -inf if unseen."""
    inputs, block_size = problem.inputs, problem.block_size
    query = inputs.query
    batch, num_heads, _, head_dim = query.shape
    num_kv_heads, blocks = key_means.shape[1], key_means.shape[2]
    estimate = key_means.new_empty((batch, num_heads, blocks))
    _estimate_kernel[(cdiv(blocks, 32), batch * num_heads)](
        query, key_means, representative, problem.kernel_geometry.kv_edges, estimate, *query.stride(), num_heads, blocks,
        inputs.distance_limit,
        HEAD_DIM=head_dim, PADDED_DIM=max(16, next_power_of_2(head_dim)), BLOCK_SIZE=block_size,
        ROWS=min(64, block_size & -block_size), QUERIES_PER_KV=num_heads // num_kv_heads, TILE=32,
    )  # fmt: skip
    return estimate


@triton.jit
def _weighted_scores(scores, key_count, o_kv, num_kv_blocks, scale, softcap, HAS_SOFTCAP: tl.constexpr):
    """Pooled scores of key blocks, -inf if unseen."""
    m_kv = o_kv < num_kv_blocks
    b_raw = tl.load(scores + o_kv, mask=m_kv, other=float("-inf"))
    b_count = tl.load(key_count + o_kv, mask=m_kv, other=0)
    m_seen = (b_raw != float("-inf")) & (b_count > 0)
    b_score = tl.where(m_seen, b_raw, 0.0) * scale
    if HAS_SOFTCAP:
        b_score = soft_capped(b_score, softcap)
    return tl.where(m_seen, b_score + tl.log(tl.maximum(b_count, 1).to(tl.float32)), float("-inf"))


@triton.jit
def _relative_entropy(p, q):
    return tl.where(p == 0, 0.0, p * tl.log(tl.where(p == 0, 1.0, p) / tl.where(p == 0, 1.0, q)))


@kernel
def _pattern_kernel(
    estimate,  # from estimated_scores
    vertical,  # (batch, num_heads, num_kv_blocks) float32: V of the pattern rows; -1: no candidate
    representative, kv_edges,
    lines,  # float32; -1: no candidate
    gamma,
    tau,  # 0-d float64
    is_query_aware, distance, kept, num_heads, num_kv_blocks, cap, min_lines, scale, softcap,
    HAS_SOFTCAP: tl.constexpr, BLOCK_SIZE: tl.constexpr, PADDED_SIZE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    # the interpreter passes Python's floats as they are
    scale = tl.cast(scale, tl.float32)
    softcap = tl.cast(softcap, tl.float32)
    family = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    batch = head // num_heads
    o_slot = tl.arange(0, PADDED_SIZE)
    b_row = tl.load(representative + batch * (1 + BLOCK_SIZE) + 1 + o_slot, mask=o_slot < BLOCK_SIZE, other=-1)
    num_rows = tl.sum((b_row >= 0).to(tl.int32), 0)

    p_scores = estimate + head * num_kv_blocks
    p_count = num_valid_keys_of(kv_edges_of(kv_edges, batch, num_kv_blocks), num_kv_blocks)
    o_lane = tl.arange(0, TILE)
    highest = tl.full([], float("-inf"), tl.float32)
    total = tl.full([], 0.0, tl.float32)
    for start in range(0, num_kv_blocks, TILE):
        b_score = _weighted_scores(p_scores, p_count, start + o_lane, num_kv_blocks, scale, softcap, HAS_SOFTCAP=HAS_SOFTCAP)
        higher = tl.maximum(highest, tl.max(b_score, 0))
        base = tl.where(higher == float("-inf"), 0.0, higher)
        total = total * tl.exp(highest - base) + tl.sum(tl.exp(b_score - base), 0)
        highest = higher
    base = tl.where(highest == float("-inf"), 0.0, highest)
    total = tl.where(total == 0, 1.0, total)
    b_divergence = tl.zeros([TILE], tl.float32)
    for start in range(0, num_kv_blocks, TILE):
        o_kv = start + o_lane
        b_score = _weighted_scores(p_scores, p_count, o_kv, num_kv_blocks, scale, softcap, HAS_SOFTCAP=HAS_SOFTCAP)
        b_estimated = tl.exp(b_score - base) / total
        b_true = tl.load(vertical + head * num_kv_blocks + o_kv, mask=o_kv < num_kv_blocks, other=0.0)
        b_true = tl.where(b_true < 0, 0.0, b_true)
        b_middle = (b_estimated + b_true) / 2
        b_divergence += _relative_entropy(b_estimated, b_middle) + _relative_entropy(b_true, b_middle)
    jsd = tl.sum(b_divergence, 0) / 2
    # NaN stays, and the head is not query-aware
    d = tl.sqrt(tl.where(jsd < 0, 0.0, jsd))
    query_aware = (d.to(tl.float64) < tl.load(tau)) & (num_rows > 0)
    if family == 0:
        tl.store(is_query_aware + head, query_aware)
        tl.store(distance + head, d)

    share = tl.where(query_aware, -1.0, tl.load(gamma + head % num_heads))
    o_lines = (family * tl.num_programs(1) + head) * num_kv_blocks
    keep_top_p(lines + o_lines, kept + o_lines, num_kv_blocks, share, cap, min_lines, TILE=TILE)


def pattern_and_lines(
    problem: BlockProblem, pattern: RepresentativeSums, index: RepresentativeSums, key_means: Tensor, gamma: Tensor,
    tau: FloatOption, min_lines: int, max_lines: int | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Steps 2 and 3a in one launch, as `plain.pattern_and_lines`."""
    geometry, inputs, block_size, representative = problem.kernel_geometry, problem.inputs, problem.block_size, pattern.rows
    lines = line_mass(index, geometry)
    # the first half: V
    vertical = lines if pattern is index else line_mass(pattern, geometry)
    estimate = estimated_scores(problem, key_means, representative)
    _, batch, num_heads, blocks = lines.shape
    is_query_aware = lines.new_empty((batch, num_heads), dtype=torch.bool)
    distance = lines.new_empty((batch, num_heads))
    kept = lines.new_empty(lines.shape, dtype=torch.int8)
    _pattern_kernel[(2, batch * num_heads)](
        estimate, vertical, representative, geometry.kv_edges, lines, gamma,
        tau if isinstance(tau, Tensor) else torch.zeros_like(gamma[0]), is_query_aware, distance, kept,
        num_heads, blocks, blocks + 1 if max_lines is None else max_lines, min_lines, inputs.scale,
        1.0 if inputs.softcap is None else inputs.softcap,
        HAS_SOFTCAP=inputs.softcap is not None, BLOCK_SIZE=block_size, PADDED_SIZE=next_power_of_2(block_size), TILE=64,
        num_warps=8,
    )  # fmt: skip
    return is_query_aware, distance, kept
