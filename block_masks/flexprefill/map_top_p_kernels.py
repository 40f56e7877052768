"""Triton kernels for top-p over the pooled map, the whole map of a head or each row, without a sort (`top_p_kernel`).

A map too large for one program takes one launch per digit, one program per chunk of rows; the next launch picks the digit from
the chunks' sums, in a fixed order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from flexmask.base.blocks import BlockProblem
from flexmask.block_masks.flexprefill.top_p_kernel import BITS, keep_top_p, missing_entries, refined_threshold, share_of_sum
from flexmask.kernels.launch import kernel
from flexmask.kernels.visibility import q_edges_of

# entries that fit one program: 16k tokens in blocks of 128
SMALL_MAP = 128 * 128
# entries up to which passes are launch-bound: 32k tokens in blocks of 128
MEDIUM_MAP = 256 * 256
# bits per digit, and chunks of rows
_SMALL = 3
_MEDIUM = 5, 32
_LARGE = 3, 64
TILE = 256


@triton.jit
def _small_map_top_p(
    values, p_last_row, share, chosen, num_q_blocks, num_kv_blocks,
    BLOCK_SIZE: tl.constexpr, PASSES: tl.constexpr, DIGIT_BITS: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """`top_p_map` for one head's map of at most SIZE entries."""
    DIGITS: tl.constexpr = 1 << DIGIT_BITS
    o_entry = tl.arange(0, SIZE)
    o_q = o_entry // num_kv_blocks
    b_end = tl.load(p_last_row + o_q, mask=o_q < num_q_blocks, other=0) // BLOCK_SIZE + 1
    m_entry = (o_q < num_q_blocks) & (o_entry - o_q * num_kv_blocks < b_end)
    b_value = tl.load(values + o_entry, mask=m_entry, other=-1.0)
    b_bits = b_value.to(tl.int32, bitcast=True)
    o_digit = tl.arange(0, DIGITS)
    low = 0
    above = tl.full([], 0.0, tl.float64)
    goal = tl.full([], 0.0, tl.float64)
    for digit_pass in range(PASSES):
        step = 1 << (DIGIT_BITS * (PASSES - 1 - digit_pass))
        b_thresholds = low + o_digit * step
        b_totals = tl.sum(tl.where(b_bits[None, :] >= b_thresholds[:, None], b_value[None, :], 0.0), 1).to(tl.float64)
        if digit_pass == 0:
            # the sum at the first threshold, 0, is the total
            goal = share_of_sum(tl.sum(tl.where(o_digit == 0, b_totals, 0.0), 0), share)
        low, above = refined_threshold(b_totals, goal, low, above, step, DIGITS=DIGITS)
    missing = tl.maximum(missing_entries(low, goal - above), 1)
    b_tied = (b_bits == low).to(tl.int32)
    b_rank = tl.cumsum(b_tied, 0) - b_tied
    m_keep = (b_bits > low) | ((b_tied != 0) & (b_rank < missing))
    tl.store(chosen + o_entry, m_keep.to(tl.int8), mask=m_entry)


@kernel
def _small_map_kernel(
    values,  # float32
    active, q_edges, gamma,
    chosen,  # int8
    num_heads, num_q_blocks, num_kv_blocks,
    BLOCK_SIZE: tl.constexpr, PASSES: tl.constexpr, DIGIT_BITS: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0).to(tl.int64)
    if tl.load(active + head) != 0:
        p_last_row = q_edges_of(q_edges, head // num_heads, num_q_blocks)
        size = num_q_blocks * num_kv_blocks
        share = tl.load(gamma + head % num_heads)
        p_values = values + head * size
        p_chosen = chosen + head * size
        if size <= SIZE // 4:
            _small_map_top_p(
                p_values, p_last_row, share, p_chosen, num_q_blocks, num_kv_blocks,
                BLOCK_SIZE=BLOCK_SIZE, PASSES=PASSES, DIGIT_BITS=DIGIT_BITS, SIZE=SIZE // 4,
            )  # fmt: skip
        else:
            _small_map_top_p(
                p_values, p_last_row, share, p_chosen, num_q_blocks, num_kv_blocks,
                BLOCK_SIZE=BLOCK_SIZE, PASSES=PASSES, DIGIT_BITS=DIGIT_BITS, SIZE=SIZE,
            )  # fmt: skip


@triton.jit
def _chosen_digit(sums, share, head, step, is_first, DIGITS: tl.constexpr, CHUNKS: tl.constexpr):
    """The threshold after the pass that wrote `sums`, the goal, and the sum of the entries above the threshold's digit."""
    o_chunk = tl.arange(0, CHUNKS)
    o_digit = tl.arange(0, DIGITS)
    p_sums = sums + head * (CHUNKS + 1) * DIGITS
    b_totals = tl.sum(tl.load(p_sums + o_chunk[:, None] * DIGITS + o_digit[None, :]), 0)
    total = tl.sum(tl.where(o_digit == 0, b_totals, 0.0), 0)
    p_state = p_sums + CHUNKS * DIGITS
    low = tl.load(p_state, mask=is_first == 0, other=0.0).to(tl.int32)
    goal = tl.load(p_state + 1, mask=is_first == 0, other=0.0)
    above = tl.load(p_state + 2, mask=is_first == 0, other=0.0)
    goal = tl.where(is_first, share_of_sum(total, share), goal)
    low, above = refined_threshold(b_totals, goal, low, above, step, DIGITS=DIGITS)
    return low, goal, above


@kernel
def _digit_pass_kernel(
    values, active, q_edges, gamma,
    # (heads, CHUNKS + 1, DIGITS) float64: the previous pass's sums; then threshold, goal and sum above, before that pass
    sums,
    new_sums,
    digit_pass,  # no constant: all passes share one compilation
    num_heads, num_q_blocks, num_kv_blocks,
    BLOCK_SIZE: tl.constexpr, PASSES: tl.constexpr, DIGIT_BITS: tl.constexpr, CHUNKS: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    DIGITS: tl.constexpr = 1 << DIGIT_BITS
    chunk = tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)
    if tl.load(active + head) != 0:
        step = 1 << (DIGIT_BITS * (PASSES - 1 - digit_pass))
        low = 0
        if digit_pass > 0:
            share = tl.load(gamma + head % num_heads)
            low, goal, above = _chosen_digit(sums, share, head, step << DIGIT_BITS, digit_pass == 1, DIGITS=DIGITS, CHUNKS=CHUNKS)
            if chunk == 0:
                p_state = new_sums + (head * (CHUNKS + 1) + CHUNKS) * DIGITS
                tl.store(p_state, low.to(tl.float64))
                tl.store(p_state + 1, goal)
                tl.store(p_state + 2, above)
        o_digit = tl.arange(0, DIGITS)
        b_thresholds = low + o_digit * step
        p_last_row = q_edges_of(q_edges, head // num_heads, num_q_blocks)
        b_totals = tl.zeros([DIGITS], tl.float64)
        for deal in range(0, tl.cdiv(tl.cdiv(num_q_blocks, ROWS), CHUNKS)):
            # groups of rows are dealt to and fro: all chunks have long and short ones
            first_q = (deal * CHUNKS + tl.where(deal % 2 == 0, chunk, CHUNKS - 1 - chunk)) * ROWS
            if first_q < num_q_blocks:
                o_q = first_q + tl.arange(0, ROWS)
                b_end = tl.load(p_last_row + o_q, mask=o_q < num_q_blocks, other=0) // BLOCK_SIZE + 1
                b_end = tl.where(o_q < num_q_blocks, b_end, 0)
                p_values = values + (head * num_q_blocks + o_q) * num_kv_blocks
                end = tl.load(p_last_row + tl.minimum(first_q + ROWS, num_q_blocks) - 1) // BLOCK_SIZE + 1
                b_sums = tl.zeros([DIGITS, COLUMNS], tl.float32)
                for start in range(0, end, COLUMNS):
                    o_kv = (start + tl.arange(0, COLUMNS))[None, :]
                    b_value = tl.load(p_values[:, None] + o_kv, mask=o_kv < b_end[:, None], other=-1.0)
                    b_bits = b_value.to(tl.int32, bitcast=True)
                    b_sums += tl.sum(tl.where(b_bits[None, :, :] >= b_thresholds[:, None, None], b_value[None, :, :], 0.0), 1)
                b_totals += tl.sum(b_sums, 1).to(tl.float64)
        tl.store(new_sums + (head * (CHUNKS + 1) + chunk) * DIGITS + o_digit, b_totals)


@kernel
def _ties_kernel(
    values, active, q_edges, sums, gamma,
    choice,  # (heads, 2) int32: the threshold, and the number of kept entries equal to it
    ties,  # (heads, num_q_blocks) int32: entries equal to it
    num_heads, num_q_blocks, num_kv_blocks,
    BLOCK_SIZE: tl.constexpr, DIGITS: tl.constexpr, CHUNKS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1).to(tl.int64)
    chunk = tl.program_id(0)
    if tl.load(active + head) != 0:
        share = tl.load(gamma + head % num_heads)
        low, goal, above = _chosen_digit(sums, share, head, 1, False, DIGITS=DIGITS, CHUNKS=CHUNKS)
        if chunk == 0:
            tl.store(choice + head * 2, low)
            tl.store(choice + head * 2 + 1, tl.maximum(missing_entries(low, goal - above), 1))
        p_last_row = q_edges_of(q_edges, head // num_heads, num_q_blocks)
        for q_block in range(chunk, num_q_blocks, CHUNKS):
            end = tl.load(p_last_row + q_block) // BLOCK_SIZE + 1
            b_tied = tl.zeros([TILE], tl.int32)
            for start in range(0, end, TILE):
                o_kv = start + tl.arange(0, TILE)
                b_value = tl.load(values + (head * num_q_blocks + q_block) * num_kv_blocks + o_kv, mask=o_kv < end, other=-1.0)
                b_tied += (b_value.to(tl.int32, bitcast=True) == low).to(tl.int32)
            tl.store(ties + head * num_q_blocks + q_block, tl.sum(b_tied, 0))


@kernel
def _chosen_kernel(
    values, active, q_edges, choice, ties,
    chosen,  # int8
    num_heads, num_q_blocks, num_kv_blocks,
    BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    q_block = tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)
    if tl.load(active + head) != 0:
        low = tl.load(choice + head * 2)
        missing = tl.load(choice + head * 2 + 1)
        o_lane = tl.arange(0, TILE)
        b_earlier = tl.zeros([TILE], tl.int32)
        for start in range(0, q_block, TILE):
            b_earlier += tl.load(ties + head * num_q_blocks + start + o_lane, mask=start + o_lane < q_block, other=0)
        tied_before = tl.sum(b_earlier, 0)
        end = tl.load(q_edges_of(q_edges, head // num_heads, num_q_blocks) + q_block) // BLOCK_SIZE + 1
        o_map_row = (head * num_q_blocks + q_block) * num_kv_blocks
        for start in range(0, end, TILE):
            o_kv = start + o_lane
            b_value = tl.load(values + o_map_row + o_kv, mask=o_kv < end, other=-1.0)
            b_bits = b_value.to(tl.int32, bitcast=True)
            b_tied = (b_bits == low).to(tl.int32)
            b_rank = tied_before + tl.cumsum(b_tied, 0) - b_tied
            m_keep = (b_bits > low) | ((b_tied != 0) & (b_rank < missing))
            tl.store(chosen + o_map_row + o_kv, m_keep.to(tl.int8), mask=o_kv < end)
            tied_before += tl.sum(b_tied, 0)


def top_p_map(problem: BlockProblem, values: Tensor, active: Tensor, gamma: Tensor) -> Tensor:
    """Each active head's heaviest blocks of `pooled_map` up to gamma of the sum; of equal ones the first. int8, as written."""
    batch, num_heads, num_q_blocks, num_kv_blocks = values.shape
    heads, q_edges, block_size = batch * num_heads, problem.kernel_geometry.q_edges, problem.block_size
    sizes = (num_heads, num_q_blocks, num_kv_blocks)
    chosen = values.new_empty(values.shape, dtype=torch.int8)
    if num_q_blocks * num_kv_blocks <= SMALL_MAP:
        _small_map_kernel[(heads,)](
            values, active, q_edges, gamma, chosen, *sizes,
            BLOCK_SIZE=block_size, PASSES=BITS // _SMALL, DIGIT_BITS=_SMALL, SIZE=SMALL_MAP, num_warps=16,
        )  # fmt: skip
        return chosen
    digit_bits, chunks = _MEDIUM if num_q_blocks * num_kv_blocks <= MEDIUM_MAP else _LARGE
    passes, digits = BITS // digit_bits, 1 << digit_bits
    sums = gamma  # not read by the first pass
    for digit_pass in range(passes):
        new_sums = values.new_empty((heads, chunks + 1, digits), dtype=torch.float64)
        _digit_pass_kernel[(chunks, heads)](
            values, active, q_edges, gamma, sums, new_sums, digit_pass, *sizes,
            BLOCK_SIZE=block_size, PASSES=passes, DIGIT_BITS=digit_bits, CHUNKS=chunks, ROWS=8, COLUMNS=128,
        )  # fmt: skip
        sums = new_sums
    choice = values.new_empty((heads, 2), dtype=torch.int32)
    ties = values.new_empty((heads, num_q_blocks), dtype=torch.int32)
    _ties_kernel[(chunks, heads)](
        values, active, q_edges, sums, gamma, choice, ties, *sizes,
        BLOCK_SIZE=block_size, DIGITS=digits, CHUNKS=chunks, TILE=TILE,
    )  # fmt: skip
    _chosen_kernel[(num_q_blocks, heads)](
        values, active, q_edges, choice, ties, chosen, *sizes, BLOCK_SIZE=block_size, TILE=TILE, num_warps=2
    )
    return chosen


@kernel
def _rows_kernel(
    values, active, q_edges, share, chosen, num_heads, num_q_blocks, num_kv_blocks, cap,
    BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    q_block = tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)
    if tl.load(active + head) != 0:
        end = tl.load(q_edges_of(q_edges, head // num_heads, num_q_blocks) + q_block) // BLOCK_SIZE + 1
        o_map_row = (head * num_q_blocks + q_block) * num_kv_blocks
        keep_top_p(values + o_map_row, chosen + o_map_row, end, tl.load(share + head % num_heads), cap, 0, TILE=TILE)


def top_p_rows(problem: BlockProblem, values: Tensor, active: Tensor, share: Tensor, max_blocks: int | None) -> Tensor:
    """As `top_p_map`, but of each row, up to `share`, (num_heads,), of the row's sum, at most `max_blocks`."""
    batch, num_heads, num_q_blocks, num_kv_blocks = values.shape
    chosen, q_edges = values.new_empty(values.shape, dtype=torch.int8), problem.kernel_geometry.q_edges
    _rows_kernel[(num_q_blocks, batch * num_heads)](
        values, active, q_edges, share, chosen, num_heads, num_q_blocks, num_kv_blocks,
        num_kv_blocks + 1 if max_blocks is None else max_blocks,
        BLOCK_SIZE=problem.block_size, TILE=TILE,
    )  # fmt: skip
    return chosen
