"""Triton kernels for the fewest pooled blocks that reach gamma, of a head's whole map or of each row, without a sort.

The fewest entries whose sum reaches a goal are those at or above some value, and non-negative floats order as their bit patterns
do. That value is found digit by digit: a pass over the map sums the entries at or above as many thresholds as a digit has values,
and picks one. Sums are float32 within some rows and float64 beyond, in a fixed order, without atomics. Programs of heads that are
not active return at once.

A small map is held by one program a head, which does everything. In a larger one each pass is a launch of many programs a head,
each of which sums a chunk of its rows; the next pass picks the digit from the sums of the chunks.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from flexmask.kernels.top_p import keep_top_p, missing_entries
from flexmask.kernels.visibility import PackedEdges

_BITS = 30  # values up to 1.0 have the bit pattern 0x3F800000, below 2**30
_TILE = 256
# entries that one program can hold: 16k tokens in blocks of 128
SMALL_MAP = 128 * 128
# entries up to which a launch takes longer than what it does, so that few of them are best: 32k tokens in blocks of 128
MEDIUM_MAP = 256 * 256
# bits of a digit, and chunks of rows
_SMALL = 3
_MEDIUM = 5, 32
_LARGE = 3, 64


@triton.jit
def _refined(totals, goal, low, above, step, DIGITS: tl.constexpr):
    """The highest threshold at or above which the goal is held, and what the entries above its digit hold.

    `totals` is what is held at or above ``low + digit * step``, `above` what is held from ``low + DIGITS * step`` on.
    """
    chosen = tl.maximum(tl.sum((totals >= goal).to(tl.int32), 0) - 1, 0)
    if chosen < DIGITS - 1:
        above = tl.sum(tl.where(tl.arange(0, DIGITS) == chosen + 1, totals, 0.0), 0)
    return low + chosen * step, above


@triton.jit
def _cover_held_map(
    values, last_row, gamma, chosen, num_q_blocks, num_kv_blocks,
    BLOCK_SIZE: tl.constexpr, PASSES: tl.constexpr, DIGIT_BITS: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """What `top_p_map` does, for one head's map of at most SIZE entries."""
    DIGITS: tl.constexpr = 1 << DIGIT_BITS
    entry = tl.arange(0, SIZE)
    row = entry // num_kv_blocks
    end = tl.load(last_row + row, mask=row < num_q_blocks, other=0) // BLOCK_SIZE + 1
    exists = (row < num_q_blocks) & (entry - row * num_kv_blocks < end)
    value = tl.load(values + entry, mask=exists, other=-1.0)
    bits = value.to(tl.int32, bitcast=True)
    digit = tl.arange(0, DIGITS)
    low = 0
    above = tl.full([], 0.0, tl.float64)
    goal = tl.full([], 0.0, tl.float64)
    for digit_pass in range(PASSES):
        step = 1 << (DIGIT_BITS * (PASSES - 1 - digit_pass))
        thresholds = low + digit * step
        totals = tl.sum(tl.where(bits[None, :] >= thresholds[:, None], value[None, :], 0.0), 1).to(tl.float64)
        if digit_pass == 0:
            # the first threshold is 0: what it holds is everything
            goal = tl.sum(tl.where(digit == 0, totals, 0.0), 0) * tl.load(gamma)
        low, above = _refined(totals, goal, low, above, step, DIGITS=DIGITS)
    missing = tl.maximum(missing_entries(low, goal - above), 1)
    tied = (bits == low).to(tl.int32)
    place = tl.cumsum(tied, 0) - tied
    keep = (bits > low) | ((tied != 0) & (place < missing))
    tl.store(chosen + entry, keep.to(tl.int8), mask=exists)


@triton.jit
def _small_map_kernel(
    values,  # (batch, num_heads, num_q_blocks, num_kv_blocks) float32
    active,  # (batch, num_heads) bool
    rows,  # edges of query blocks: the last row comes first
    gamma,  # 0-d float64
    chosen,  # (batch, num_heads, num_q_blocks, num_kv_blocks) int8
    rows_stride_batch,
    num_heads,
    num_q_blocks,
    num_kv_blocks,
    BLOCK_SIZE: tl.constexpr,
    PASSES: tl.constexpr,
    DIGIT_BITS: tl.constexpr,
    SIZE: tl.constexpr,
):
    head = tl.program_id(0).to(tl.int64)
    if tl.load(active + head) != 0:
        last_row = rows + (head // num_heads) * rows_stride_batch
        size = num_q_blocks * num_kv_blocks
        values += head * size
        chosen += head * size
        if size <= SIZE // 4:
            _cover_held_map(
                values, last_row, gamma, chosen, num_q_blocks, num_kv_blocks,
                BLOCK_SIZE=BLOCK_SIZE, PASSES=PASSES, DIGIT_BITS=DIGIT_BITS, SIZE=SIZE // 4,
            )  # fmt: skip
        else:
            _cover_held_map(
                values, last_row, gamma, chosen, num_q_blocks, num_kv_blocks,
                BLOCK_SIZE=BLOCK_SIZE, PASSES=PASSES, DIGIT_BITS=DIGIT_BITS, SIZE=SIZE,
            )  # fmt: skip


@triton.jit
def _chosen_digit(sums, gamma, head, step, is_first, DIGITS: tl.constexpr, CHUNKS: tl.constexpr):
    """The threshold after the pass that wrote `sums`, the goal, and what the entries above the threshold's digit hold.

    `is_first`: that pass was the first, which had no threshold to leave; its first one is 0, so that it holds everything.
    """
    chunk = tl.arange(0, CHUNKS)
    digit = tl.arange(0, DIGITS)
    sums += head * (CHUNKS + 1) * DIGITS
    totals = tl.sum(tl.load(sums + chunk[:, None] * DIGITS + digit[None, :]), 0)
    everything = tl.sum(tl.where(digit == 0, totals, 0.0), 0)
    state = sums + CHUNKS * DIGITS
    low = tl.load(state, mask=is_first == 0, other=0.0).to(tl.int32)
    goal = tl.load(state + 1, mask=is_first == 0, other=0.0)
    above = tl.load(state + 2, mask=is_first == 0, other=0.0)
    goal = tl.where(is_first, everything * tl.load(gamma), goal)
    low, above = _refined(totals, goal, low, above, step, DIGITS=DIGITS)
    return low, goal, above


@triton.jit
def _digit_pass_kernel(
    values,
    active,
    rows,
    gamma,
    # (heads, CHUNKS + 1, DIGITS) float64: the sums of the pass before; then threshold, goal and what is above, before that pass
    sums,
    new_sums,
    digit_pass,  # a number, not a constant, so that all passes share what is compiled
    rows_stride_batch,
    num_heads,
    num_q_blocks,
    num_kv_blocks,
    BLOCK_SIZE: tl.constexpr,
    PASSES: tl.constexpr,
    DIGIT_BITS: tl.constexpr,
    CHUNKS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    DIGITS: tl.constexpr = 1 << DIGIT_BITS
    chunk = tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)
    if tl.load(active + head) != 0:
        step = 1 << (DIGIT_BITS * (PASSES - 1 - digit_pass))
        low = 0
        if digit_pass > 0:
            low, goal, above = _chosen_digit(sums, gamma, head, step << DIGIT_BITS, digit_pass == 1, DIGITS=DIGITS, CHUNKS=CHUNKS)
            if chunk == 0:
                new_state = new_sums + (head * (CHUNKS + 1) + CHUNKS) * DIGITS
                tl.store(new_state, low.to(tl.float64))
                tl.store(new_state + 1, goal)
                tl.store(new_state + 2, above)
        digit = tl.arange(0, DIGITS)
        thresholds = low + digit * step
        last_row = rows + (head // num_heads) * rows_stride_batch
        totals = tl.zeros([DIGITS], tl.float64)
        for deal in range(0, tl.cdiv(tl.cdiv(num_q_blocks, ROWS), CHUNKS)):
            # groups of rows are dealt out to and fro, so that all chunks have long and short ones
            first = (deal * CHUNKS + tl.where(deal % 2 == 0, chunk, CHUNKS - 1 - chunk)) * ROWS
            if first < num_q_blocks:
                row = first + tl.arange(0, ROWS)
                end = tl.load(last_row + row, mask=row < num_q_blocks, other=0) // BLOCK_SIZE + 1
                end = tl.where(row < num_q_blocks, end, 0)
                line = values + (head * num_q_blocks + row) * num_kv_blocks
                longest = tl.load(last_row + tl.minimum(first + ROWS, num_q_blocks) - 1) // BLOCK_SIZE + 1
                held = tl.zeros([DIGITS, COLUMNS], tl.float32)
                for start in range(0, longest, COLUMNS):
                    column = (start + tl.arange(0, COLUMNS))[None, :]
                    value = tl.load(line[:, None] + column, mask=column < end[:, None], other=-1.0)
                    bits = value.to(tl.int32, bitcast=True)
                    held += tl.sum(tl.where(bits[None, :, :] >= thresholds[:, None, None], value[None, :, :], 0.0), 1)
                totals += tl.sum(held, 1).to(tl.float64)
        tl.store(new_sums + (head * (CHUNKS + 1) + chunk) * DIGITS + digit, totals)


@triton.jit
def _ties_kernel(
    values,
    active,
    rows,
    sums,
    gamma,
    choice,  # (heads, 2) int32: the threshold, and how many of the entries equal to it are kept
    ties,  # (heads, num_q_blocks) int32: entries of each row equal to it
    rows_stride_batch,
    num_heads,
    num_q_blocks,
    num_kv_blocks,
    BLOCK_SIZE: tl.constexpr,
    DIGITS: tl.constexpr,
    CHUNKS: tl.constexpr,
    TILE: tl.constexpr,
):
    head = tl.program_id(1).to(tl.int64)
    chunk = tl.program_id(0)
    if tl.load(active + head) != 0:
        low, goal, above = _chosen_digit(sums, gamma, head, 1, False, DIGITS=DIGITS, CHUNKS=CHUNKS)
        if chunk == 0:
            tl.store(choice + head * 2, low)
            tl.store(choice + head * 2 + 1, tl.maximum(missing_entries(low, goal - above), 1))
        last_row = rows + (head // num_heads) * rows_stride_batch
        for row in range(chunk, num_q_blocks, CHUNKS):
            to = tl.load(last_row + row) // BLOCK_SIZE + 1
            tied = tl.zeros([TILE], tl.int32)
            for start in range(0, to, TILE):
                column = start + tl.arange(0, TILE)
                value = tl.load(values + (head * num_q_blocks + row) * num_kv_blocks + column, mask=column < to, other=-1.0)
                tied += (value.to(tl.int32, bitcast=True) == low).to(tl.int32)
            tl.store(ties + head * num_q_blocks + row, tl.sum(tied, 0))


@triton.jit
def _chosen_kernel(
    values,
    active,
    rows,
    choice,
    ties,
    chosen,  # (batch, num_heads, num_q_blocks, num_kv_blocks) int8
    rows_stride_batch,
    num_heads,
    num_q_blocks,
    num_kv_blocks,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
):
    row = tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)
    if tl.load(active + head) != 0:
        low = tl.load(choice + head * 2)
        missing = tl.load(choice + head * 2 + 1)
        lane = tl.arange(0, TILE)
        earlier = tl.zeros([TILE], tl.int32)
        for start in range(0, row, TILE):
            earlier += tl.load(ties + head * num_q_blocks + start + lane, mask=start + lane < row, other=0)
        before = tl.sum(earlier, 0)
        to = tl.load(rows + (head // num_heads) * rows_stride_batch + row) // BLOCK_SIZE + 1
        line = (head * num_q_blocks + row) * num_kv_blocks
        for start in range(0, to, TILE):
            column = start + lane
            value = tl.load(values + line + column, mask=column < to, other=-1.0)
            bits = value.to(tl.int32, bitcast=True)
            tied = (bits == low).to(tl.int32)
            place = before + tl.cumsum(tied, 0) - tied
            keep = (bits > low) | ((tied != 0) & (place < missing))
            tl.store(chosen + line + column, keep.to(tl.int8), mask=column < to)
            before += tl.sum(tied, 0)


def top_p_map(values: Tensor, active: Tensor, edges: PackedEdges, gamma: Tensor, block_size: int) -> Tensor:
    """The fewest blocks of each active head's whole map that reach gamma times its sum; of equal ones the first.

    Parameters
    ----------
    values
        (batch, num_heads, num_q_blocks, num_kv_blocks) float32, as `pooled_map` writes it.
    active
        (batch, num_heads) bool.
    edges
        What each block sees.
    gamma
        0-d float64, below 1.

    Returns
    -------
    Tensor
        int8, as values; written where values is.
    """
    batch, num_heads, num_q_blocks, num_kv_blocks = values.shape
    heads = batch * num_heads
    sizes = (num_q_blocks if edges.rows.shape[1] > 1 else 0, num_heads, num_q_blocks, num_kv_blocks)
    chosen = values.new_empty(values.shape, dtype=torch.int8)
    if num_q_blocks * num_kv_blocks <= SMALL_MAP:
        _small_map_kernel[(heads,)](
            values, active, edges.rows, gamma, chosen, *sizes,
            BLOCK_SIZE=block_size, PASSES=_BITS // _SMALL, DIGIT_BITS=_SMALL, SIZE=SMALL_MAP, num_warps=16,
        )  # fmt: skip
        return chosen
    digit_bits, chunks = _MEDIUM if num_q_blocks * num_kv_blocks <= MEDIUM_MAP else _LARGE
    passes, digits = _BITS // digit_bits, 1 << digit_bits
    sums = gamma  # a first pass does not read it
    for digit_pass in range(passes):
        new_sums = values.new_empty((heads, chunks + 1, digits), dtype=torch.float64)
        _digit_pass_kernel[(chunks, heads)](
            values, active, edges.rows, gamma, sums, new_sums, digit_pass, *sizes,
            BLOCK_SIZE=block_size, PASSES=passes, DIGIT_BITS=digit_bits, CHUNKS=chunks, ROWS=8, COLUMNS=128,
        )  # fmt: skip
        sums = new_sums
    choice = values.new_empty((heads, 2), dtype=torch.int32)
    ties = values.new_empty((heads, num_q_blocks), dtype=torch.int32)
    _ties_kernel[(chunks, heads)](
        values, active, edges.rows, sums, gamma, choice, ties, *sizes,
        BLOCK_SIZE=block_size, DIGITS=digits, CHUNKS=chunks, TILE=_TILE,
    )  # fmt: skip
    _chosen_kernel[(num_q_blocks, heads)](
        values, active, edges.rows, choice, ties, chosen, *sizes, BLOCK_SIZE=block_size, TILE=_TILE, num_warps=2
    )
    return chosen


@triton.jit
def _rows_kernel(
    values,
    active,
    rows,
    share,  # 0-d float64
    chosen,
    rows_stride_batch,
    num_heads,
    num_q_blocks,
    num_kv_blocks,
    cap,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
):
    row = tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)
    if tl.load(active + head) != 0:
        to = tl.load(rows + (head // num_heads) * rows_stride_batch + row) // BLOCK_SIZE + 1
        line = (head * num_q_blocks + row) * num_kv_blocks
        keep_top_p(values + line, chosen + line, to, tl.load(share), cap, 0, TILE=TILE)


def top_p_rows(
    values: Tensor, active: Tensor, edges: PackedEdges, share: Tensor, max_blocks: int | None, block_size: int
) -> Tensor:
    """The fewest blocks of each row that reach `share` of its sum, at most `max_blocks`; see `top_p_map`."""
    batch, num_heads, num_q_blocks, num_kv_blocks = values.shape
    chosen = values.new_empty(values.shape, dtype=torch.int8)
    _rows_kernel[(num_q_blocks, batch * num_heads)](
        values,
        active,
        edges.rows,
        share,
        chosen,
        num_q_blocks if edges.rows.shape[1] > 1 else 0,
        num_heads,
        num_q_blocks,
        num_kv_blocks,
        num_kv_blocks + 1 if max_blocks is None else max_blocks,
        BLOCK_SIZE=block_size,
        TILE=_TILE,
    )
    return chosen
