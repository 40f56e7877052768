"""Triton kernel for the row evidence of hybrid selection: the twin of `flexmask.plain.row_evidence` with its top-p.

A program takes one query block of some query heads of a key head at a time, so that they share the key means. It goes over the
means twice, for each row's softmax and for its mean over the rows, which it keeps in a line of memory of its own, and selects from
that
line. The number of programs is fixed: nothing as large as a map of floats is ever written.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from flexmask._torch import computed_once
from flexmask.base.inputs import AttentionInputs
from flexmask.base.visibility import Tokens
from flexmask.config import FlexPrefillConfig
from flexmask.kernels.scores import soft_capped
from flexmask.kernels.top_p import BITS as _BITS
from flexmask.kernels.top_p import keep_top_p, missing_entries
from flexmask.kernels.visibility import PackedEdges

BITS = tl.constexpr(_BITS)
# programs, a few for each multiprocessor of the largest GPUs
PROGRAMS = 528
# query rows that a program holds at a time, their bytes, query blocks, and key blocks
_ROWS = 128
_QUERY_BYTES = 32 * 1024
_Q_BLOCKS = 8
_COLUMNS = 64
_WARPS = 4
_STAGES = 2


@triton.jit
def _scores(
    q, means, low_means, columns, last_valid_keys, counts, positions, taken, dims, num_kv_blocks, max_distance, scale, softcap,
    HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, HAS_SOFTCAP: tl.constexpr, IS_HALF: tl.constexpr, HAS_TF32: tl.constexpr,
):  # fmt: skip
    """Scores of rows with key means in powers of two, weighed by the number of keys; -inf where a row sees nothing."""
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
    last_valid_key = tl.load(last_valid_keys + columns, mask=exists, other=0)[None, :]
    count = tl.load(counts + columns, mask=exists, other=0)
    score = score * 1.4426950408889634 + tl.log2(tl.maximum(count, 1).to(tl.float32))[None, :]
    own = (positions // BLOCK_SIZE)[:, None]
    sees = (columns[None, :] == own) | ((columns[None, :] < own) & (positions[:, None] - last_valid_key < max_distance))
    return tl.where(sees & taken[:, None] & exists[None, :], score, float("-inf"))


@triton.jit
def _select(lines, chosen, begin, to, here, gamma, cap, num_kv_blocks, LINES: tl.constexpr, SIZE: tl.constexpr):
    """Top-p of every line of R, all at once; at most SIZE entries from `begin` on. The rule is that of `keep_top_p`."""
    column = begin + tl.arange(0, SIZE)[None, :]
    exists = (column < to[:, None]) & here[:, None]
    value = tl.load(lines + tl.arange(0, LINES)[:, None] * num_kv_blocks + column, mask=exists, other=-1.0)
    value = tl.where(value == value, value, 0.0)
    bits = value.to(tl.int32, bitcast=True)
    value = tl.maximum(value, 0.0)
    goal = tl.where(gamma >= 1, 1e300, tl.sum(value, 1).to(tl.float64) * gamma)
    # the highest value at which the entries at or above it reach the goal, bit by bit
    low = tl.zeros([LINES], tl.int32)
    for bit in range(BITS):
        threshold = low + (1 << (BITS - 1 - bit))
        above = bits >= threshold[:, None]
        enough = tl.sum(tl.where(above, value, 0.0), 1).to(tl.float64) >= goal
        enough = enough | (tl.sum(above.to(tl.int32), 1) >= cap)
        low = tl.where(enough, threshold, low)
    above = bits > low[:, None]
    missing = missing_entries(low, goal - tl.sum(tl.where(above, value, 0.0), 1).to(tl.float64))
    missing = tl.minimum(missing, cap - tl.sum(above.to(tl.int32), 1))
    tied = (bits == low[:, None]).to(tl.int32)
    place = tl.cumsum(tied, 1) - tied
    keep = above | ((tied != 0) & (place < missing[:, None]))
    tl.store(chosen[:, None] + column, keep.to(tl.int8), mask=exists)


@triton.jit
def _evidence_kernel(
    query,  # (batch, num_heads, q_len, head_dim), any strides
    means,  # (batch, num_kv_heads, num_kv_blocks, head_dim) float32, or of query's dtype if IS_HALF
    low_means,  # the rest of the means, read if IS_HALF
    row_valid,  # (batch, q_len) int8, read if PADDED
    rows,  # edges, see PackedEdges
    keys,
    gamma,  # 0-d float64
    lines,  # (PROGRAMS, LINES, num_kv_blocks) float32: room for R
    chosen,  # (batch, num_heads, num_q_blocks, num_kv_blocks) int8, written unless MEASURE
    keep,  # (batch, num_heads, num_q_blocks, num_kv_blocks) bool, read if MEASURE
    held,  # (batch, num_heads, num_q_blocks) float32, written if MEASURE: R of the kept blocks
    query_stride_batch,
    query_stride_head,
    query_stride_token,
    query_stride_dim,
    rows_stride,  # between planes
    keys_stride,
    rows_stride_batch,  # 0 where all agree
    keys_stride_batch,
    key_heads,  # batch * num_kv_heads
    num_kv_heads,
    q_len,
    num_q_blocks,
    num_kv_blocks,
    max_distance,
    cap,
    scale,
    softcap,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROW_STRIDE: tl.constexpr,
    GROUPS: tl.constexpr,
    HEADS: tl.constexpr,
    Q_BLOCKS: tl.constexpr,
    ROWS: tl.constexpr,
    ROW_TILES: tl.constexpr,
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
    dims = tl.arange(0, PADDED_DIM)
    lane = tl.arange(0, LINES * ROWS)
    line = tl.arange(0, LINES)
    own_lines = lines + tl.program_id(0).to(tl.int64) * LINES * num_kv_blocks
    strips = (num_q_blocks + Q_BLOCKS - 1) // Q_BLOCKS
    per_strip = key_heads * PARTS
    for item in range(tl.program_id(0), strips * per_strip, tl.num_programs(0)):
        # long rows first, so that short ones fill the gaps at the end
        strip = strips - 1 - item // per_strip
        key_head = ((item % per_strip) // PARTS).to(tl.int64)
        part = item % PARTS  # per_strip is a multiple of PARTS
        batch = key_head // num_kv_heads
        row_edges = rows + batch * rows_stride_batch
        key_edges = keys + batch * keys_stride_batch
        mean_rows = means + key_head * num_kv_blocks * HEAD_DIM
        low_mean_rows = low_means + key_head * num_kv_blocks * HEAD_DIM

        # the lines of this item: query blocks, of each some heads
        q_block = strip * Q_BLOCKS + line // HEADS
        group_head = part * HEADS + line % HEADS
        here = (q_block < num_q_blocks) & (group_head < GROUPS)
        row_to = tl.where(here, tl.load(row_edges + q_block, mask=here, other=0) // BLOCK_SIZE + 1, 0)
        to = tl.max(row_to, 0)
        begin = tl.maximum(tl.load(row_edges + rows_stride + strip * Q_BLOCKS) - max_distance, 0) // BLOCK_SIZE
        head = key_head * GROUPS + group_head  # of all batch rows
        at = head * num_q_blocks + q_block

        number = tl.zeros([LINES], tl.int32)
        in_kept = tl.zeros([LINES], tl.float32)
        for tile in tl.static_range(ROW_TILES):
            q_block_of = strip * Q_BLOCKS + lane // (ROWS * HEADS)
            group_head_of = part * HEADS + (lane // ROWS) % HEADS
            slot = (tile * ROWS + lane % ROWS) * ROW_STRIDE
            row = q_block_of * BLOCK_SIZE + slot
            taken = (slot < BLOCK_SIZE) & (row < q_len) & (group_head_of < GROUPS)
            if PADDED:
                taken = taken & (tl.load(row_valid + batch * q_len + row, mask=taken, other=0) != 0)
            number += tl.sum(tl.reshape(taken.to(tl.int32), (LINES, ROWS)), 1)
            first_head = (key_head % num_kv_heads) * GROUPS
            place = query + batch * query_stride_batch + (first_head + group_head_of)[:, None] * query_stride_head
            place += row[:, None].to(tl.int64) * query_stride_token + dims[None, :].to(tl.int64) * query_stride_dim
            q = tl.load(place, mask=taken[:, None] & (dims < HEAD_DIM)[None, :], other=0.0)
            positions = tl.load(row_edges + rows_stride + q_block_of, mask=taken, other=0) + slot
            highest = tl.full([LINES * ROWS], float("-inf"), tl.float32)
            total = tl.zeros([LINES * ROWS], tl.float32)
            for start in range(begin, to, COLUMNS):
                score = _scores(
                    q, mean_rows, low_mean_rows, start + tl.arange(0, COLUMNS), key_edges, key_edges + 2 * keys_stride, positions,
                    taken, dims, num_kv_blocks, max_distance, scale, softcap,
                    HEAD_DIM=HEAD_DIM, BLOCK_SIZE=BLOCK_SIZE, HAS_SOFTCAP=HAS_SOFTCAP, IS_HALF=IS_HALF, HAS_TF32=HAS_TF32,
                )  # fmt: skip
                higher = tl.maximum(highest, tl.max(score, 1))
                base = tl.where(higher == float("-inf"), 0.0, higher)
                total = total * tl.exp2(highest - base) + tl.sum(tl.exp2(score - base[:, None]), 1)
                highest = higher
            base = tl.where(highest == float("-inf"), 0.0, highest)
            factor = 1.0 / tl.where(total == 0, 1.0, total)
            # the products once more: cheaper than to write the scores and read them back
            for start in range(begin, to, COLUMNS):
                columns = start + tl.arange(0, COLUMNS)
                score = _scores(
                    q, mean_rows, low_mean_rows, columns, key_edges, key_edges + 2 * keys_stride, positions,
                    taken, dims, num_kv_blocks, max_distance, scale, softcap,
                    HEAD_DIM=HEAD_DIM, BLOCK_SIZE=BLOCK_SIZE, HAS_SOFTCAP=HAS_SOFTCAP, IS_HALF=IS_HALF, HAS_TF32=HAS_TF32,
                )  # fmt: skip
                p = tl.exp2(score - base[:, None]) * factor[:, None]
                by_line = tl.sum(tl.reshape(p, (LINES, ROWS, COLUMNS)), 1)
                there = (columns < to)[None, :]
                if MEASURE:
                    wanted = (columns[None, :] < row_to[:, None]) & here[:, None]
                    kept = tl.load(keep + at[:, None] * num_kv_blocks + columns[None, :], mask=wanted, other=0) != 0
                    in_kept += tl.sum(tl.where(kept, by_line, 0.0), 1)
                else:
                    spot = own_lines + line[:, None] * num_kv_blocks + columns[None, :]
                    if tile > 0:
                        by_line += tl.load(spot, mask=there, other=0.0)
                    tl.store(spot, by_line, mask=there)
        if MEASURE:
            mean = tl.where(number > 0, in_kept / tl.maximum(number, 1).to(tl.float32), float("nan"))
            tl.store(held + at, mean, mask=here)
        else:
            # a line is R times its number of rows, which no share of it notices; other threads of the program wrote it
            tl.debug_barrier()
            share = tl.load(gamma)
            length = to - begin
            places = chosen + at * num_kv_blocks
            if length <= 256:
                _select(own_lines, places, begin, row_to, here, share, cap, num_kv_blocks, LINES=LINES, SIZE=256)
            elif length <= 1024:
                _select(own_lines, places, begin, row_to, here, share, cap, num_kv_blocks, LINES=LINES, SIZE=1024)
            else:
                for index in range(LINES):
                    index_to = tl.sum(tl.where(line == index, row_to, 0), 0)
                    index_at = tl.sum(tl.where(line == index, at, 0), 0)
                    keep_top_p(
                        own_lines + index * num_kv_blocks + begin, chosen + index_at * num_kv_blocks + begin,
                        tl.maximum(index_to - begin, 0), share, cap, 0, TILE=64,
                    )  # fmt: skip
            tl.debug_barrier()


def split_means(means: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Key means as the kernel multiplies them: in float16 and bfloat16 a mean and the rest of it, which hold twice the digits."""
    if dtype == torch.float32:
        return means, means
    high = means.to(dtype)
    return computed_once(high), computed_once((means - high.float()).to(dtype))


def row_blocks(
    inputs: AttentionInputs,
    means: tuple[Tensor, Tensor],
    tokens: Tokens,
    edges: PackedEdges,
    gamma: Tensor,
    config: FlexPrefillConfig,
) -> Tensor:
    """The fewest key blocks of every query block that hold gamma of its row evidence, within the cap.

    Parameters
    ----------
    inputs
        The problem.
    means
        Key means, from `split_means`.
    tokens, edges
        Which rows are tokens, and which blocks see which.
    gamma
        0-d float64.
    config
        Block size, row stride and cap.

    Returns
    -------
    Tensor
        (batch, num_heads, num_q_blocks, num_kv_blocks) int8; unwritten in each row past the key block in which the query block's
        last row stands, of no meaning where nothing is visible.
    """
    batch, num_heads, _, _ = inputs.query.shape
    chosen = means[0].new_empty((batch, num_heads, edges.rows.shape[2], means[0].shape[2]), dtype=torch.int8)
    _launch(inputs, means, tokens, edges, config, gamma=gamma, chosen=chosen)
    return chosen


def row_coverage(
    inputs: AttentionInputs,
    means: tuple[Tensor, Tensor],
    tokens: Tokens,
    edges: PackedEdges,
    keep: Tensor,
    config: FlexPrefillConfig,
) -> Tensor:
    """Row evidence that the blocks of `keep` hold, mean over the query blocks with rows asked, (batch, num_heads) float32."""
    held = means[0].new_empty(keep.shape[:3], dtype=torch.float32)
    _launch(inputs, means, tokens, edges, config, keep=keep, held=held)
    return held.nanmean(-1).nan_to_num(0.0)


def _launch(
    inputs: AttentionInputs,
    means: tuple[Tensor, Tensor],
    tokens: Tokens,
    edges: PackedEdges,
    config: FlexPrefillConfig,
    **written: Tensor,
) -> None:
    query, window, softcap = inputs.query, inputs.window, inputs.softcap
    batch, num_heads, q_len, head_dim = query.shape
    num_kv_heads, num_kv_blocks = means[0].shape[1:3]
    num_q_blocks, groups = edges.rows.shape[2], num_heads // num_kv_heads
    kv_len = inputs.key.shape[2]
    samples = triton.next_power_of_2(config.block_size // config.row_stride)
    padded_dim = max(16, triton.next_power_of_2(head_dim))
    # rows at a time: as many as fit into the shared memory of consumer GPUs, next to the keys
    most = min(_ROWS, _QUERY_BYTES // (padded_dim * query.element_size()))
    heads = min(triton.next_power_of_2(groups), max(1, most // samples))
    q_blocks = max(1, min(_Q_BLOCKS, most // (samples * heads)))
    rows = max(min(samples, most), 16 // (heads * q_blocks))
    lines = query.new_empty((PROGRAMS, q_blocks * heads, num_kv_blocks), dtype=torch.float32)
    shared = edges.rows.shape[1] == 1
    _evidence_kernel[(PROGRAMS,)](
        query,
        *means,
        tokens.row_valid.to(torch.int8).contiguous() if tokens.padded else edges.rows,
        edges.rows,
        edges.keys,
        written.get("gamma", lines),
        lines,
        written.get("chosen", lines),
        written.get("keep", lines),
        written.get("held", lines),
        *query.stride(),
        edges.rows.stride(0),
        edges.keys.stride(0),
        0 if shared else num_q_blocks,
        0 if shared else num_kv_blocks,
        batch * num_kv_heads,
        num_kv_heads,
        q_len,
        num_q_blocks,
        num_kv_blocks,
        kv_len if window is None else min(window, kv_len),
        num_kv_blocks + 1 if config.max_blocks is None else config.max_blocks,
        inputs.scale,
        1.0 if softcap is None else softcap,
        HEAD_DIM=head_dim,
        PADDED_DIM=padded_dim,
        BLOCK_SIZE=config.block_size,
        ROW_STRIDE=config.row_stride,
        GROUPS=groups,
        HEADS=heads,
        Q_BLOCKS=q_blocks,
        ROWS=rows,
        ROW_TILES=triton.cdiv(samples, rows),
        COLUMNS=_COLUMNS,
        HAS_SOFTCAP=softcap is not None,
        IS_HALF=query.dtype != torch.float32,
        # three products in TF32 are as exact as one in float32, and faster; AMD's GPUs have none
        HAS_TF32=torch.version.hip is None,
        PADDED=tokens.padded,
        MEASURE="held" in written,
        num_warps=_WARPS,
        # a second buffer of keys does not fit into the shared memory of consumer GPUs
        num_stages=_STAGES if padded_dim <= 128 else 1,
    )
