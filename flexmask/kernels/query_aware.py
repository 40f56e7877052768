"""Triton kernel for the pooled attention map of query-aware heads: softmax over key blocks, without a map of scores."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from flexmask.base.blocks import BlockProblem
from flexmask.base.inputs import AttentionInputs
from flexmask.kernels.block_lists import Blocks
from flexmask.kernels.pooling import block_means
from flexmask.kernels.query_aware_top_p import top_p_map, top_p_rows
from flexmask.kernels.scores import soft_capped
from flexmask.kernels.visibility import PackedEdges, row_edges, sees

_ROWS = 16
_COLUMNS = 64


@triton.jit
def _scores(
    q, k_means, columns, keys, keys_stride, own_first, own_last, first_valid_row, dims, num_kv_blocks, kv_len, max_distance,
    scale, softcap,
    HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_TF32: tl.constexpr,
):  # fmt: skip
    """Pooled scores of a tile in powers of two; -inf where the query block sees nothing of the key block."""
    exists = columns < num_kv_blocks
    k = tl.load(
        k_means + columns[None, :] * HEAD_DIM + dims[:, None], mask=exists[None, :] & (dims < HEAD_DIM)[:, None], other=0.0
    )
    score = tl.dot(q, k, input_precision="tf32x3" if HAS_TF32 else "ieee") * scale
    if HAS_SOFTCAP:
        score = soft_capped(score, softcap)
    last_valid_key = tl.load(keys + columns, mask=exists, other=0)[None, :]
    count = tl.load(keys + 2 * keys_stride + columns, mask=exists, other=0)
    score = score * 1.4426950408889634 + tl.log2(tl.maximum(count, 1).to(tl.float32))[None, :]
    last_key = tl.minimum(columns * BLOCK_SIZE + BLOCK_SIZE, kv_len)[None, :] - 1
    visible = sees(columns[None, :], own_first, own_last, first_valid_row, last_valid_key, last_key, max_distance)
    return tl.where(visible & exists[None, :] & (count > 0)[None, :], score, float("-inf"))


@triton.jit
def _pooled_map_kernel(
    q_means,  # (batch, num_heads, num_q_blocks, head_dim) float32
    k_means,  # (batch, num_kv_heads, num_kv_blocks, head_dim) float32
    active,  # (batch, num_heads) bool
    rows,  # edges, see PackedEdges
    keys,
    values,  # (batch, num_heads, num_q_blocks, num_kv_blocks) float32
    rows_stride,  # between planes
    keys_stride,
    rows_stride_batch,  # 0 where all agree
    keys_stride_batch,
    num_heads,
    num_q_blocks,
    num_kv_blocks,
    kv_len,
    max_distance,
    scale,
    softcap,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    GROUPS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_TF32: tl.constexpr,
):
    # compilers hand Python's floats over in float64
    scale = tl.cast(scale, tl.float32)
    softcap = tl.cast(softcap, tl.float32)
    head = tl.program_id(1).to(tl.int64)
    if tl.load(active + head) != 0:
        batch = head // num_heads
        dims = tl.arange(0, PADDED_DIM)
        # long rows first, so that short ones fill the gaps at the end
        q_block = (tl.num_programs(0) - 1 - tl.program_id(0)) * ROWS + tl.arange(0, ROWS)
        here = q_block < num_q_blocks
        last_row, _, first_valid_row, own_first, own_last, _ = row_edges(
            rows + batch * rows_stride_batch, rows_stride, q_block, here
        )
        first_valid_row, own_first, own_last = first_valid_row[:, None], own_first[:, None], own_last[:, None]
        row_to = last_row // BLOCK_SIZE + 1
        row_to = tl.where(here, row_to, 0)
        to = tl.max(row_to, 0)
        key_edges = keys + batch * keys_stride_batch
        key_head = batch * (num_heads // GROUPS) + (head % num_heads) // GROUPS
        key_means = k_means + key_head * num_kv_blocks * HEAD_DIM
        q = tl.load(
            q_means + (head * num_q_blocks + q_block)[:, None] * HEAD_DIM + dims[None, :],
            mask=here[:, None] & (dims < HEAD_DIM)[None, :],
            other=0.0,
        )
        highest = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        for start in range(0, to, COLUMNS):
            columns = start + tl.arange(0, COLUMNS)
            score = _scores(
                q, key_means, columns, key_edges, keys_stride, own_first, own_last, first_valid_row, dims, num_kv_blocks, kv_len,
                max_distance, scale, softcap,
                HEAD_DIM=HEAD_DIM, BLOCK_SIZE=BLOCK_SIZE, HAS_SOFTCAP=HAS_SOFTCAP, HAS_TF32=HAS_TF32,
            )  # fmt: skip
            higher = tl.maximum(highest, tl.max(score, 1))
            base = tl.where(higher == float("-inf"), 0.0, higher)
            total = total * tl.exp2(highest - base) + tl.sum(tl.exp2(score - base[:, None]), 1)
            highest = higher
        base = tl.where(highest == float("-inf"), 0.0, highest)
        factor = 1.0 / tl.where(total == 0, 1.0, total)
        # the products once more: cheaper than to write the scores and read them back
        for start in range(0, to, COLUMNS):
            columns = start + tl.arange(0, COLUMNS)
            score = _scores(
                q, key_means, columns, key_edges, keys_stride, own_first, own_last, first_valid_row, dims, num_kv_blocks, kv_len,
                max_distance, scale, softcap,
                HEAD_DIM=HEAD_DIM, BLOCK_SIZE=BLOCK_SIZE, HAS_SOFTCAP=HAS_SOFTCAP, HAS_TF32=HAS_TF32,
            )  # fmt: skip
            p = tl.exp2(score - base[:, None]) * factor[:, None]
            p = tl.where(score == float("-inf"), -1.0, tl.where(p == p, p, 0.0))
            tl.store(
                values + (head * num_q_blocks + q_block)[:, None] * num_kv_blocks + columns[None, :],
                p,
                mask=here[:, None] & (columns[None, :] < row_to[:, None]),
            )


def pooled_map(
    q_means: Tensor,
    k_means: Tensor,
    active: Tensor,
    edges: PackedEdges,
    inputs: AttentionInputs,
    block_size: int,
) -> Tensor:
    """Pooled attention of every query block to the key blocks it sees, for active heads.

    Parameters
    ----------
    q_means, k_means
        (batch, num_heads, num_q_blocks, head_dim) and (batch, num_kv_heads, num_kv_blocks, head_dim) float32.
    active
        (batch, num_heads) bool.
    edges
        What each block sees.
    inputs
        The problem.

    Returns
    -------
    Tensor
        (batch, num_heads, num_q_blocks, num_kv_blocks) float32, -1 where nothing is visible, NaN replaced by 0. Unwritten in
        heads that are not active, and in each row past the key block in which the query block's last row stands.
    """
    kv_len, scale, softcap, window = inputs.key.shape[2], inputs.scale, inputs.softcap, inputs.window
    batch, num_heads, num_q_blocks, head_dim = q_means.shape
    num_kv_heads, num_kv_blocks = k_means.shape[1], k_means.shape[2]
    values = q_means.new_empty((batch, num_heads, num_q_blocks, num_kv_blocks))
    shared = edges.rows.shape[1] == 1
    padded_dim = max(16, triton.next_power_of_2(head_dim))
    _pooled_map_kernel[(triton.cdiv(num_q_blocks, _ROWS), batch * num_heads)](
        q_means,
        k_means,
        active,
        edges.rows,
        edges.keys,
        values,
        edges.rows.stride(0),
        edges.keys.stride(0),
        0 if shared else num_q_blocks,
        0 if shared else num_kv_blocks,
        num_heads,
        num_q_blocks,
        num_kv_blocks,
        kv_len,
        kv_len if window is None else min(window, kv_len),
        scale,
        1.0 if softcap is None else softcap,
        HEAD_DIM=head_dim,
        PADDED_DIM=padded_dim,
        BLOCK_SIZE=block_size,
        GROUPS=num_heads // num_kv_heads,
        ROWS=_ROWS,
        COLUMNS=_COLUMNS,
        HAS_SOFTCAP=softcap is not None,
        # three products in TF32 are as exact as one in float32, and faster; AMD's GPUs have none
        HAS_TF32=torch.version.hip is None,
        num_warps=4,
        # a second buffer of keys does not fit into the shared memory of consumer GPUs
        num_stages=2 if padded_dim <= 128 else 1,
    )
    return values


def query_aware_blocks(
    problem: BlockProblem, key_means: Tensor, is_query_aware: Tensor, gamma: Tensor, rule: str, max_blocks: int | None
) -> Blocks:
    """Step 3b: the blocks that query-aware heads keep of their pooled map; those of other heads stay unwritten."""
    inputs, tokens, edges, size = problem.inputs, problem.tokens, problem.edges, problem.block_size
    query_means = block_means(inputs.query, tokens.row_valid if tokens.padded else None, is_query_aware, size)
    values = pooled_map(query_means, key_means, is_query_aware, edges, inputs, size)
    if rule == "per_query":
        return Blocks(top_p_rows(values, is_query_aware, edges, gamma, max_blocks, size), is_query_aware)
    blocks = top_p_map(values, is_query_aware, edges, gamma, size)
    if max_blocks is not None:
        within = torch.where(blocks != 0, values, -1.0)
        blocks = top_p_rows(within, is_query_aware, edges, torch.ones_like(gamma), max_blocks, size)
    return Blocks(blocks, is_query_aware)
