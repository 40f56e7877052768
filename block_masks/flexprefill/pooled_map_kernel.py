"""Triton kernel for the pooled attention map of query-aware heads: softmax over key blocks, without a map of scores."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from flexmask.base.blocks import BlockProblem
from flexmask.base.selection import ChosenBlocks
from flexmask.block_masks.flexprefill.map_top_p_kernels import top_p_map, top_p_rows
from flexmask.kernels.launch import cdiv, kernel, next_power_of_2, soft_capped
from flexmask.kernels.pooling import query_means
from flexmask.kernels.visibility import kv_edges_of, num_valid_keys_of, row_edges, sees

_ROWS = 16
_COLUMNS = 64


@triton.jit
def _scores(
    b_q, k_means, o_kv, kv_edges, b_first_valid_row, b_last_valid_row, o_dim, num_kv_blocks, kv_len, distance_limit, scale,
    softcap, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_TF32: tl.constexpr,
):  # fmt: skip
    """Pooled scores of a tile in powers of two; -inf where nothing is visible."""
    m_kv = o_kv < num_kv_blocks
    b_k = tl.load(
        k_means + o_kv[None, :] * HEAD_DIM + o_dim[:, None], mask=m_kv[None, :] & (o_dim < HEAD_DIM)[:, None], other=0.0
    )
    b_score = tl.dot(b_q, b_k, input_precision="tf32x3" if HAS_TF32 else "ieee") * scale
    if HAS_SOFTCAP:
        b_score = soft_capped(b_score, softcap)
    b_last_valid_key = tl.load(kv_edges + o_kv, mask=m_kv, other=0)[None, :]
    b_count = tl.load(num_valid_keys_of(kv_edges, num_kv_blocks) + o_kv, mask=m_kv, other=0)
    b_score = b_score * 1.4426950408889634 + tl.log2(tl.maximum(b_count, 1).to(tl.float32))[None, :]
    m_visible = sees(o_kv[None, :], b_first_valid_row, b_last_valid_row, b_last_valid_key, kv_len, distance_limit, BLOCK_SIZE)
    return tl.where(m_visible & m_kv[None, :] & (b_count > 0)[None, :], b_score, float("-inf"))


@kernel
def _pooled_map_kernel(
    q_means, k_means, active, q_edges, kv_edges,
    values,  # float32
    num_heads, num_q_blocks, num_kv_blocks, kv_len, distance_limit, scale, softcap,
    HEAD_DIM: tl.constexpr, PADDED_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, QUERIES_PER_KV: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_TF32: tl.constexpr,
):  # fmt: skip
    # the interpreter passes Python's floats as they are
    scale = tl.cast(scale, tl.float32)
    softcap = tl.cast(softcap, tl.float32)
    head = tl.program_id(1).to(tl.int64)
    if tl.load(active + head) != 0:
        batch = head // num_heads
        o_dim = tl.arange(0, PADDED_DIM)
        # long rows first
        o_q = (tl.num_programs(0) - 1 - tl.program_id(0)) * ROWS + tl.arange(0, ROWS)
        m_q = o_q < num_q_blocks
        b_last_row, _, b_first_valid_row, b_last_valid_row, _ = row_edges(q_edges, batch, num_q_blocks, o_q, m_q)
        b_first_valid_row, b_last_valid_row = b_first_valid_row[:, None], b_last_valid_row[:, None]
        b_end = b_last_row // BLOCK_SIZE + 1
        b_end = tl.where(m_q, b_end, 0)
        end = tl.max(b_end, 0)
        p_kv_edges = kv_edges_of(kv_edges, batch, num_kv_blocks)
        kv_head = batch * (num_heads // QUERIES_PER_KV) + (head % num_heads) // QUERIES_PER_KV
        p_k_means = k_means + kv_head * num_kv_blocks * HEAD_DIM
        b_q = tl.load(
            q_means + (head * num_q_blocks + o_q)[:, None] * HEAD_DIM + o_dim[None, :],
            mask=m_q[:, None] & (o_dim < HEAD_DIM)[None, :],
            other=0.0,
        )
        b_max = tl.full([ROWS], float("-inf"), tl.float32)
        b_total = tl.zeros([ROWS], tl.float32)
        # computing the products again is cheaper than storing the scores
        for is_second in tl.static_range(2):
            b_base = tl.where(b_max == float("-inf"), 0.0, b_max)
            b_factor = 1.0 / tl.where(b_total == 0, 1.0, b_total)
            for start in range(0, end, COLUMNS):
                o_kv = start + tl.arange(0, COLUMNS)
                b_score = _scores(
                    b_q, p_k_means, o_kv, p_kv_edges, b_first_valid_row, b_last_valid_row, o_dim, num_kv_blocks, kv_len,
                    distance_limit, scale, softcap,
                    HEAD_DIM=HEAD_DIM, BLOCK_SIZE=BLOCK_SIZE, HAS_SOFTCAP=HAS_SOFTCAP, HAS_TF32=HAS_TF32,
                )  # fmt: skip
                if is_second:
                    b_p = tl.exp2(b_score - b_base[:, None]) * b_factor[:, None]
                    b_p = tl.where(b_score == float("-inf"), -1.0, tl.where(b_p == b_p, b_p, 0.0))
                    p_values = values + (head * num_q_blocks + o_q)[:, None] * num_kv_blocks + o_kv[None, :]
                    tl.store(p_values, b_p, mask=m_q[:, None] & (o_kv[None, :] < b_end[:, None]))
                else:
                    b_new_max = tl.maximum(b_max, tl.max(b_score, 1))
                    b_new_base = tl.where(b_new_max == float("-inf"), 0.0, b_new_max)
                    b_total = b_total * tl.exp2(b_max - b_new_base) + tl.sum(tl.exp2(b_score - b_new_base[:, None]), 1)
                    b_max = b_new_max


def pooled_map(problem: BlockProblem, key_means: Tensor, active: Tensor) -> Tensor:
    """Pooled attention of every query block to the key blocks it sees, a map in float32; -1 where none, 0 for NaN.

    Unwritten in inactive heads, and in each row past the key block of the query block's last row.
    """
    inputs, geometry, means = problem.inputs, problem.kernel_geometry, query_means(problem, active)
    batch, num_heads, num_q_blocks, head_dim = means.shape
    num_kv_heads, num_kv_blocks = key_means.shape[1], key_means.shape[2]
    values = means.new_empty((batch, num_heads, num_q_blocks, num_kv_blocks))
    padded_dim = max(16, next_power_of_2(head_dim))
    _pooled_map_kernel[(cdiv(num_q_blocks, _ROWS), batch * num_heads)](
        means, key_means, active, geometry.q_edges, geometry.kv_edges, values, num_heads, num_q_blocks, num_kv_blocks,
        inputs.key.shape[2], inputs.distance_limit, inputs.scale, 1.0 if inputs.softcap is None else inputs.softcap,
        HEAD_DIM=head_dim, PADDED_DIM=padded_dim, BLOCK_SIZE=problem.block_size, QUERIES_PER_KV=num_heads // num_kv_heads,
        ROWS=_ROWS, COLUMNS=_COLUMNS if padded_dim <= 256 else _COLUMNS // 4, HAS_SOFTCAP=inputs.softcap is not None,
        # three products in TF32 are as exact as one in float32, and faster; not on AMD
        HAS_TF32=torch.version.hip is None, num_warps=4,
        # shared memory of consumer GPUs
        num_stages=2 if padded_dim <= 128 else 1,
    )  # fmt: skip
    return values


def query_aware_blocks(
    problem: BlockProblem, key_means: Tensor, is_query_aware: Tensor, gamma: Tensor, rule: str, max_blocks: int | None
) -> ChosenBlocks:
    """Step 3b: the blocks that query-aware heads keep of their pooled map; unwritten in other heads."""
    values = pooled_map(problem, key_means, is_query_aware)
    if rule == "per_query":
        return ChosenBlocks(top_p_rows(problem, values, is_query_aware, gamma, max_blocks), is_query_aware)
    blocks = top_p_map(problem, values, is_query_aware, gamma)
    if max_blocks is not None:
        within = torch.where(blocks != 0, values, -1.0)
        blocks = top_p_rows(problem, within, is_query_aware, torch.ones_like(gamma), max_blocks)
    return ChosenBlocks(blocks, is_query_aware)
