"""Triton kernels for the fewest pooled blocks that reach gamma, of a head's whole map or of each row, without a sort.

The fewest entries whose sum reaches a goal are those at or above some value, and non-negative floats order as their bit patterns
do. That value is found digit by digit: each of ten passes over the map sums the entries at or above eight thresholds, by chunks
of rows, and the next pass picks the digit from the sums of the chunks. Sums are float32 within a few rows and float64 beyond, in
a fixed order, without atomics. Programs of heads that are not active return at once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from flexmask.triton_fewest import keep_fewest, missing_entries
from flexmask.triton_visibility import PackedEdges

_DIGIT_BITS = 3
_PASSES = 10  # 30 bits: values up to 1.0 have the bit pattern 0x3F800000, below 2**30
_CHUNKS = 64
_TILE = 256


@triton.jit
def _chosen_digit(sums, state, gamma, head, STEP: tl.constexpr, FIRST: tl.constexpr, DIGITS: tl.constexpr, CHUNKS: tl.constexpr):
    """The threshold after the pass that wrote `sums`, the goal, and what the entries above the threshold's digit hold."""
    chunk = tl.arange(0, CHUNKS)
    digit = tl.arange(0, DIGITS)
    parts = tl.load(sums + (head * CHUNKS + chunk[:, None]) * DIGITS + digit[None, :])
    totals = tl.sum(parts, 0)
    if FIRST:
        low = 0
        above = tl.full([], 0.0, tl.float64)
        goal = tl.sum(tl.where(digit == 0, totals, 0.0), 0) * tl.load(gamma)
    else:
        low = tl.load(state + head * 3).to(tl.int32)
        goal = tl.load(state + head * 3 + 1)
        above = tl.load(state + head * 3 + 2)
    chosen = tl.maximum(tl.sum((totals >= goal).to(tl.int32), 0) - 1, 0)
    if chosen < DIGITS - 1:
        above = tl.sum(tl.where(digit == chosen + 1, totals, 0.0), 0)
    return low + chosen * STEP, goal, above


@triton.jit
def _digit_pass_kernel(
    values,  # (batch, num_heads, num_q_blocks, num_kv_blocks) float32
    active,  # (batch, num_heads) bool
    rows,  # edges of query blocks: the last row comes first
    gamma,  # 0-d float64
    sums,  # (heads, CHUNKS, DIGITS) float64: of the pass before
    state,  # (heads, 3) float64: threshold, goal and what is above, before that pass
    new_sums,
    new_state,
    rows_stride_batch,
    num_heads,
    num_q_blocks,
    num_kv_blocks,
    BLOCK_SIZE: tl.constexpr,
    PASS: tl.constexpr,
    PASSES: tl.constexpr,
    DIGIT_BITS: tl.constexpr,
    CHUNKS: tl.constexpr,
    ROWS_AT_ONCE: tl.constexpr,
    TILE: tl.constexpr,
):
    DIGITS: tl.constexpr = 1 << DIGIT_BITS
    STEP: tl.constexpr = 1 << (DIGIT_BITS * (PASSES - 1 - PASS))
    chunk = tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)
    if tl.load(active + head) != 0:
        low = 0
        if PASS > 0:
            low, goal, above = _chosen_digit(
                sums, state, gamma, head, STEP=STEP << DIGIT_BITS, FIRST=PASS == 1, DIGITS=DIGITS, CHUNKS=CHUNKS
            )
            if chunk == 0:
                tl.store(new_state + head * 3, low.to(tl.float64))
                tl.store(new_state + head * 3 + 1, goal)
                tl.store(new_state + head * 3 + 2, above)
        digit = tl.arange(0, DIGITS)
        thresholds = low + digit * STEP
        last_row = rows + (head // num_heads) * rows_stride_batch
        totals = tl.zeros([DIGITS], tl.float64)
        # a chunk's rows lie far apart, so that all chunks have long and short ones
        for first in range(chunk, num_q_blocks, CHUNKS * ROWS_AT_ONCE):
            parts = tl.zeros([DIGITS, TILE], tl.float32)
            for row in range(first, tl.minimum(first + CHUNKS * ROWS_AT_ONCE, num_q_blocks), CHUNKS):
                to = tl.load(last_row + row) // BLOCK_SIZE + 1
                for start in range(0, to, TILE):
                    column = start + tl.arange(0, TILE)
                    value = tl.load(values + (head * num_q_blocks + row) * num_kv_blocks + column, mask=column < to, other=-1.0)
                    bits = value.to(tl.int32, bitcast=True)
                    parts += tl.where(bits[None, :] >= thresholds[:, None], value[None, :], 0.0)
            totals += tl.sum(parts, 1).to(tl.float64)
        tl.store(new_sums + (head * CHUNKS + chunk) * DIGITS + digit, totals)


@triton.jit
def _ties_kernel(
    values,
    active,
    rows,
    sums,
    state,
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
        low, goal, above = _chosen_digit(sums, state, gamma, head, STEP=1, FIRST=False, DIGITS=DIGITS, CHUNKS=CHUNKS)
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


def covering_blocks(values: Tensor, active: Tensor, edges: PackedEdges, gamma: Tensor, block_size: int) -> Tensor:
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
    sizes = (
        num_q_blocks if edges.rows.shape[1] > 1 else 0,
        num_heads,
        num_q_blocks,
        num_kv_blocks,
    )
    sums = state = gamma  # what a first pass does not read
    for digit_pass in range(_PASSES):
        new_sums = values.new_empty((heads, _CHUNKS, 1 << _DIGIT_BITS), dtype=torch.float64)
        new_state = values.new_empty((heads, 3), dtype=torch.float64)
        _digit_pass_kernel[(_CHUNKS, heads)](
            values, active, edges.rows, gamma, sums, state, new_sums, new_state, *sizes,
            BLOCK_SIZE=block_size, PASS=digit_pass, PASSES=_PASSES, DIGIT_BITS=_DIGIT_BITS, CHUNKS=_CHUNKS,
            ROWS_AT_ONCE=8, TILE=_TILE,
        )  # fmt: skip
        sums, state = new_sums, new_state
    choice = values.new_empty((heads, 2), dtype=torch.int32)
    ties = values.new_empty((heads, num_q_blocks), dtype=torch.int32)
    _ties_kernel[(_CHUNKS, heads)](
        values, active, edges.rows, sums, state, gamma, choice, ties, *sizes,
        BLOCK_SIZE=block_size, DIGITS=1 << _DIGIT_BITS, CHUNKS=_CHUNKS, TILE=_TILE,
    )  # fmt: skip
    chosen = values.new_empty(values.shape, dtype=torch.int8)
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
        keep_fewest(values + line, chosen + line, to, tl.load(share), cap, 0, TILE=TILE)


def covering_rows(
    values: Tensor, active: Tensor, edges: PackedEdges, share: Tensor, max_blocks: int | None, block_size: int
) -> Tensor:
    """The fewest blocks of each row that reach `share` of its sum, at most `max_blocks`; see `covering_blocks`."""
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
