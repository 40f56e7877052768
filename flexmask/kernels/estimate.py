"""Triton kernel for the estimate of a head's attention: the mean representative row against the mean of each key block."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from flexmask.base.inputs import AttentionInputs


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
        place = queries + row[:, None].to(tl.int64) * query_stride_token + dims[None, :].to(tl.int64) * query_stride_dim
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


def estimated_scores(inputs: AttentionInputs, key_means: Tensor, rows: Tensor, last_valid_key: Tensor, block_size: int) -> Tensor:
    """Unscaled scores of the mean representative row with the mean of each key block, (batch, num_heads, num_kv_blocks) float32.

    -inf for key blocks of which no representative row sees anything. `last_valid_key` is (batch or 1, num_kv_blocks) int32 as in
    `BlockEdges`; `key_means` is (batch, num_kv_heads, num_kv_blocks, head_dim) float32; `rows` as in `block_sums`.
    """
    query, kv_len, window = inputs.query, inputs.key.shape[2], inputs.window
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
        PADDED_DIM=max(16, triton.next_power_of_2(head_dim)),
        BLOCK_SIZE=block_size,
        ROWS=min(64, block_size & -block_size),
        GROUPS=num_heads // num_kv_heads,
        TILE=32,
    )
    return estimate
