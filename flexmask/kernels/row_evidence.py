"""Triton kernel for the row evidence of hybrid selection: the twin of `flexmask.plain.row_evidence`, with its threshold.

A program takes a few neighbouring query blocks and the query heads of one key head, so that they share the key means. It goes
over the means twice, for the softmax of its rows and for their sums over the rows of a block, and writes the decision alone.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from flexmask.base.blocks import BlockProblem
from flexmask.kernels.block_lists import Blocks
from flexmask.kernels.pooling import split_means
from flexmask.kernels.scores import soft_capped

# query rows of a program and their bytes, which must fit into the shared memory of consumer GPUs next to the key means
_ROWS = 64
_QUERY_BYTES = 32 * 1024
# query blocks, and key blocks at a time
_Q_BLOCKS = 4
_COLUMNS = 32


@triton.jit
def _scores(
    q, means, low_means, columns, at_edge, last_valid_keys, counts, positions, taken, dims, num_kv_blocks, max_distance, scale,
    softcap, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, HAS_SOFTCAP: tl.constexpr, IS_HALF: tl.constexpr,
    HAS_TF32: tl.constexpr,
):  # fmt: skip
    """Scores of rows with key means in powers of two, weighed by the number of keys; -inf where a row sees nothing.

    Most tiles are not `at_edge`: every row sees all of their key blocks, which are whole.
    """
    exists = columns < num_kv_blocks
    place = columns[None, :] * HEAD_DIM + dims[:, None]
    there = exists[None, :] & (dims < HEAD_DIM)[:, None]
    k = tl.load(means + place, mask=there, other=0.0)
    if IS_HALF:
        # a mean is the sum of two halves, so that the product is as exact as one in float32
        score = tl.dot(q, k) + tl.dot(q, tl.load(low_means + place, mask=there, other=0.0))
    else:
        score = tl.dot(q, k, input_precision="tf32x3" if HAS_TF32 else "ieee")
    score *= scale
    if HAS_SOFTCAP:
        score = soft_capped(score, softcap)
    weight = tl.log2((columns * 0 + BLOCK_SIZE).to(tl.float32))
    if at_edge:
        weight = tl.log2(tl.maximum(tl.load(counts + columns, mask=exists, other=0), 1).to(tl.float32))
    score = score * 1.4426950408889634 + weight[None, :]
    if at_edge:
        last_valid_key = tl.load(last_valid_keys + columns, mask=exists, other=0)[None, :]
        own = (positions // BLOCK_SIZE)[:, None]
        sees = (columns[None, :] == own) | ((columns[None, :] < own) & (positions[:, None] - last_valid_key < max_distance))
        score = tl.where(sees & taken[:, None] & exists[None, :], score, float("-inf"))
    return score


@triton.jit
def _evidence_kernel(
    query,  # (batch, num_heads, q_len, head_dim), any strides
    means,  # (batch, num_kv_heads, num_kv_blocks, head_dim) float32, or of query's dtype if IS_HALF
    low_means,  # the rest of the means, read if IS_HALF
    row_valid,  # (batch, q_len) int8, read if PADDED
    rows,  # edges, see PackedEdges
    keys,
    thresholds,  # (batch or 1, num_heads, num_q_blocks) float64, read unless MEASURE
    codes,  # (batch, num_heads, num_q_blocks, num_kv_blocks) int8, written unless MEASURE: see Blocks
    keep,  # (batch, num_heads, num_q_blocks, num_kv_blocks) bool, read if MEASURE
    held,  # (batch, num_heads, num_q_blocks) float32, written if MEASURE: mean attention that the kept blocks hold; NaN: no rows
    query_stride_batch,
    query_stride_head,
    query_stride_token,
    query_stride_dim,
    rows_stride,  # between planes
    keys_stride,
    rows_stride_batch,  # 0 where all agree
    keys_stride_batch,
    thresholds_stride_batch,
    num_kv_heads,
    q_len,
    num_q_blocks,
    num_kv_blocks,
    max_distance,
    scale,
    softcap,
    of_lines,  # share of its threshold from which on a query block takes lines
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROW_STRIDE: tl.constexpr,
    GROUPS: tl.constexpr,
    HEADS: tl.constexpr,
    Q_BLOCKS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    IS_HALF: tl.constexpr,
    HAS_TF32: tl.constexpr,
    PADDED: tl.constexpr,
    MEASURE: tl.constexpr,
):
    # compilers hand Python's floats over in float64
    scale = tl.cast(scale, tl.float32)
    softcap = tl.cast(softcap, tl.float32)
    PARTS: tl.constexpr = (GROUPS + HEADS - 1) // HEADS
    LINES: tl.constexpr = Q_BLOCKS * HEADS
    # long rows first, so that short ones fill the gaps at the end
    first_q_block = (tl.num_programs(0) - 1 - tl.program_id(0)) * Q_BLOCKS
    key_head = (tl.program_id(1) // PARTS).to(tl.int64)
    first_group_head = (tl.program_id(1) % PARTS) * HEADS
    batch = key_head // num_kv_heads
    row_edges = rows + batch * rows_stride_batch
    key_edges = keys + batch * keys_stride_batch
    mean_rows = means + key_head * num_kv_blocks * HEAD_DIM
    low_mean_rows = low_means + key_head * num_kv_blocks * HEAD_DIM

    # the rows: of some query blocks, of each some heads, of each the rows asked
    lane = tl.arange(0, LINES * ROWS)
    dims = tl.arange(0, PADDED_DIM)
    q_block_of = first_q_block + lane // (ROWS * HEADS)
    group_head_of = first_group_head + (lane // ROWS) % HEADS
    slot = (lane % ROWS) * ROW_STRIDE
    row = q_block_of * BLOCK_SIZE + slot
    taken = (slot < BLOCK_SIZE) & (row < q_len) & (group_head_of < GROUPS)
    if PADDED:
        taken = taken & (tl.load(row_valid + batch * q_len + row, mask=taken, other=0) != 0)
    positions = tl.load(row_edges + rows_stride + q_block_of, mask=taken, other=0) + slot
    place = query + batch * query_stride_batch
    place += ((key_head % num_kv_heads) * GROUPS + group_head_of)[:, None] * query_stride_head
    place += row[:, None].to(tl.int64) * query_stride_token + dims[None, :].to(tl.int64) * query_stride_dim
    q = tl.load(place, mask=taken[:, None] & (dims < HEAD_DIM)[None, :], other=0.0)

    # the lines: of some query blocks, of each some heads
    line = tl.arange(0, LINES)
    q_block = first_q_block + line // HEADS
    group_head = first_group_head + line % HEADS
    here = (q_block < num_q_blocks) & (group_head < GROUPS)
    number = tl.sum(tl.reshape(taken.to(tl.int32), (LINES, ROWS)), 1)
    row_to = tl.where(here, tl.load(row_edges + q_block, mask=here, other=0) // BLOCK_SIZE + 1, 0)
    at = (key_head * GROUPS + group_head) * num_q_blocks + q_block
    to = tl.max(row_to, 0)
    first_row = tl.load(row_edges + rows_stride + first_q_block)
    begin = tl.maximum(first_row - max_distance, 0) // BLOCK_SIZE
    # key blocks before this one are whole, and every row here stands behind them
    inner_to = first_row // BLOCK_SIZE
    if PADDED | (tl.min((taken | (group_head_of >= GROUPS)).to(tl.int32), 0) == 0):
        inner_to = 0
    last_row = first_row + Q_BLOCKS * BLOCK_SIZE - 1

    highest = tl.full([LINES * ROWS], float("-inf"), tl.float32)
    total = tl.zeros([LINES * ROWS], tl.float32)
    for start in range(begin, to, COLUMNS):
        at_edge = (start + COLUMNS > inner_to) | (last_row - start * BLOCK_SIZE >= max_distance)
        score = _scores(
            q, mean_rows, low_mean_rows, start + tl.arange(0, COLUMNS), at_edge, key_edges, key_edges + 2 * keys_stride,
            positions, taken, dims, num_kv_blocks, max_distance, scale, softcap,
            HEAD_DIM=HEAD_DIM, BLOCK_SIZE=BLOCK_SIZE, HAS_SOFTCAP=HAS_SOFTCAP, IS_HALF=IS_HALF, HAS_TF32=HAS_TF32,
        )  # fmt: skip
        higher = tl.maximum(highest, tl.max(score, 1))
        base = tl.where(higher == float("-inf"), 0.0, higher)
        total = total * tl.exp2(highest - base) + tl.sum(tl.exp2(score - base[:, None]), 1)
        highest = higher
    base = tl.where(highest == float("-inf"), 0.0, highest)
    factor = 1.0 / tl.where(total == 0, 1.0, total)

    in_kept = tl.zeros([LINES], tl.float32)
    least_of_rows = tl.zeros([LINES], tl.float32)
    least_of_lines = tl.zeros([LINES], tl.float32)
    if not MEASURE:
        # of the sum of squares, so that no root need be taken
        head = (key_head % num_kv_heads) * GROUPS + group_head
        squares = tl.maximum(number, 1).to(tl.float64)
        own = batch * thresholds_stride_batch + head * num_q_blocks + q_block
        least = tl.load(thresholds + own, mask=here, other=0.0)
        least_of_rows = (squares * least * least).to(tl.float32)
        least *= tl.cast(of_lines, tl.float64)
        least_of_lines = (squares * least * least).to(tl.float32)
    # the products once more: cheaper than to write the scores and read them back
    for start in range(begin, to, COLUMNS):
        columns = start + tl.arange(0, COLUMNS)
        at_edge = (start + COLUMNS > inner_to) | (last_row - start * BLOCK_SIZE >= max_distance)
        score = _scores(
            q, mean_rows, low_mean_rows, columns, at_edge, key_edges, key_edges + 2 * keys_stride,
            positions, taken, dims, num_kv_blocks, max_distance, scale, softcap,
            HEAD_DIM=HEAD_DIM, BLOCK_SIZE=BLOCK_SIZE, HAS_SOFTCAP=HAS_SOFTCAP, IS_HALF=IS_HALF, HAS_TF32=HAS_TF32,
        )  # fmt: skip
        p = tl.exp2(score - base[:, None]) * factor[:, None]
        there = (columns[None, :] < row_to[:, None]) & here[:, None]
        entry = at[:, None] * num_kv_blocks + columns[None, :]
        if MEASURE:
            by_line = tl.sum(tl.reshape(p, (LINES, ROWS, COLUMNS)), 1)
            in_kept += tl.sum(tl.where(tl.load(keep + entry, mask=there, other=0) != 0, by_line, 0.0), 1)
        else:
            by_line = tl.sum(tl.reshape(p * p, (LINES, ROWS, COLUMNS)), 1)
            # NaN drops nothing
            takes_lines = ((by_line < least_of_lines[:, None]) == 0).to(tl.int8)
            tl.store(codes + entry, takes_lines + 2 * ((by_line < least_of_rows[:, None]) == 0).to(tl.int8), mask=there)
    if MEASURE:
        mean = tl.where(number > 0, in_kept / tl.maximum(number, 1).to(tl.float32), float("nan"))
        tl.store(held + at, mean, mask=here)


class RowEvidence(NamedTuple):
    """The attention of the sampled rows to the means of the key blocks, of which the kernel writes decisions only."""

    means: tuple[Tensor, Tensor]  # of the keys, from `split_means`
    row_stride: int


def row_evidence(problem: BlockProblem, row_stride: int) -> RowEvidence:
    """The means that the sampled rows, every `row_stride`-th of a query block, are compared with."""
    tokens = problem.tokens
    return RowEvidence(
        split_means(problem.inputs.key, None if tokens.filled else tokens.key_valid, problem.block_size), row_stride
    )


def row_blocks(problem: BlockProblem, evidence: RowEvidence, thresholds: Tensor, of_lines: float) -> Blocks:
    """The key blocks whose evidence reaches the threshold of their query block, and those where it reaches `of_lines` times that.

    The codes are unwritten in each row past the key block in which the query block's last row stands, and before a window, and of
    no meaning where nothing is visible.
    """
    batch, num_heads, _, _ = problem.inputs.query.shape
    means = evidence.means[0]
    codes = means.new_empty((batch, num_heads, problem.edges.rows.shape[2], means.shape[2]), dtype=torch.int8)
    _launch(problem, evidence, of_lines, thresholds=thresholds, codes=codes)
    return Blocks(codes, gated=True)


def row_coverage(problem: BlockProblem, evidence: RowEvidence, keep: Tensor) -> Tensor:
    """Evidence that the kept blocks hold, mean over the query blocks with rows, (batch, num_heads) float32."""
    held = evidence.means[0].new_empty(keep.shape[:3], dtype=torch.float32)
    _launch(problem, evidence, keep=keep, held=held)
    return held.nanmean(-1)


def _launch(problem: BlockProblem, evidence: RowEvidence, of_lines: float = 1.0, **written: Tensor) -> None:
    inputs, tokens, edges, means, block_size = problem.inputs, problem.tokens, problem.edges, evidence.means, problem.block_size
    query, window, softcap = inputs.query, inputs.window, inputs.softcap
    batch, num_heads, q_len, head_dim = query.shape
    num_kv_heads, num_kv_blocks = means[0].shape[1:3]
    num_q_blocks, groups = edges.rows.shape[2], num_heads // num_kv_heads
    kv_len = inputs.key.shape[2]
    samples = triton.next_power_of_2(block_size // evidence.row_stride)
    padded_dim = max(16, triton.next_power_of_2(head_dim))
    # rows at a time: as many as fit into the shared memory of consumer GPUs, next to the keys
    most = min(_ROWS, _QUERY_BYTES // (padded_dim * query.element_size()))
    heads = min(triton.next_power_of_2(groups), max(1, most // samples))
    q_blocks = max(1, min(_Q_BLOCKS, most // (samples * heads)))
    rows = max(samples, 16 // (heads * q_blocks))
    shared = edges.rows.shape[1] == 1
    # a kernel reads and writes what its variant needs of these
    any_tensor = edges.rows
    _evidence_kernel[(triton.cdiv(num_q_blocks, q_blocks), batch * num_kv_heads * triton.cdiv(groups, heads))](
        query,
        *means,
        tokens.row_valid.to(torch.int8).contiguous() if tokens.padded else any_tensor,
        edges.rows,
        edges.keys,
        written.get("thresholds", any_tensor),
        written.get("codes", any_tensor),
        written.get("keep", any_tensor),
        written.get("held", any_tensor),
        *query.stride(),
        edges.rows.stride(0),
        edges.keys.stride(0),
        0 if shared else num_q_blocks,
        0 if shared else num_kv_blocks,
        num_heads * num_q_blocks if "thresholds" in written and written["thresholds"].shape[0] > 1 else 0,
        num_kv_heads,
        q_len,
        num_q_blocks,
        num_kv_blocks,
        kv_len if window is None else min(window, kv_len),
        inputs.scale,
        1.0 if softcap is None else softcap,
        of_lines,
        HEAD_DIM=head_dim,
        PADDED_DIM=padded_dim,
        BLOCK_SIZE=block_size,
        ROW_STRIDE=evidence.row_stride,
        GROUPS=groups,
        HEADS=heads,
        Q_BLOCKS=q_blocks,
        ROWS=rows,
        COLUMNS=_COLUMNS,
        HAS_SOFTCAP=softcap is not None,
        IS_HALF=query.dtype != torch.float32,
        # three products in TF32 are as exact as one in float32, and faster; AMD's GPUs have none
        HAS_TF32=torch.version.hip is None,
        PADDED=tokens.padded,
        MEASURE="held" in written,
        num_warps=4,
        num_stages=2,
    )
