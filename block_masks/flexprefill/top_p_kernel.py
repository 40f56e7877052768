"""Top-p without a sort, for one row.

The heaviest entries that just reach a sum are those at or above some value, and non-negative floats order as their bit patterns
do. That value is found digit by digit: each pass sums the entries at or above 32 thresholds, and counts them for both bounds.
"""

from __future__ import annotations

import triton
import triton.language as tl

BITS = 30  # values up to 1.0 have the bit pattern 0x3F800000, below 2**30


@triton.jit
def keep_top_p(values, kept, size, share, cap, min_lines, TILE: tl.constexpr):
    """Keep the heaviest candidates of a row up to `share` of its sum, at most `cap`, at least `min_lines` entries.

    `values` points to `size` float32: negative ones are not candidates, NaN counts as 0, of equal values the lower index wins.
    `kept` points to `size` int8. A `share` of 1 keeps every candidate up to the cap; `min_lines` is met last.
    """
    DIGIT_BITS: tl.constexpr = 5  # of BITS
    PASSES: tl.constexpr = 6
    DIGITS: tl.constexpr = 1 << DIGIT_BITS
    o_lane = tl.arange(0, TILE)
    o_digit = tl.arange(0, DIGITS)
    low = 0
    goal = tl.full([], 0.0, tl.float64)
    for digit_pass in tl.static_range(PASSES):
        step = 1 << (DIGIT_BITS * (PASSES - 1 - digit_pass))
        b_thresholds = low + o_digit * step
        b_sums = tl.zeros([DIGITS, TILE], tl.float32)
        b_number = tl.zeros([DIGITS, TILE], tl.int32)
        for start in range(0, size, TILE):
            b_value, b_bits = _entries(values, start + o_lane, size)
            m_above = b_bits[None, :] >= b_thresholds[:, None]
            b_sums += tl.where(m_above, b_value[None, :], 0.0)
            b_number += m_above.to(tl.int32)
        b_totals = tl.sum(b_sums.to(tl.float64), 1)
        b_numbers = tl.sum(b_number, 1)
        if digit_pass == 0:
            # the sum at the first threshold, 0, is the total
            total = tl.sum(tl.where(o_digit == 0, b_totals, 0.0), 0)
            goal = share_of_sum(total, share)
            min_lines = tl.minimum(min_lines, tl.sum(tl.where(o_digit == 0, b_numbers, 0), 0))
        m_enough = ((b_totals >= goal) | (b_numbers >= cap)) & (b_numbers >= min_lines)
        low += tl.maximum(tl.sum(m_enough.to(tl.int32), 0) - 1, 0) * step

    b_sum_above = tl.zeros([TILE], tl.float32)
    b_number_above = tl.zeros([TILE], tl.int32)
    for start in range(0, size, TILE):
        b_value, b_bits = _entries(values, start + o_lane, size)
        b_sum_above += tl.where(b_bits > low, b_value, 0.0)
        b_number_above += (b_bits > low).to(tl.int32)
    missing = missing_entries(low, goal - tl.sum(b_sum_above.to(tl.float64), 0))
    count = tl.sum(b_number_above, 0)
    missing = tl.maximum(tl.minimum(missing, cap - count), min_lines - count)

    tied_before = 0
    for start in range(0, size, TILE):
        o_entry = start + o_lane
        b_value, b_bits = _entries(values, o_entry, size)
        b_tied = (b_bits == low).to(tl.int32)
        b_rank = tied_before + tl.cumsum(b_tied, 0) - b_tied
        m_keep = (b_bits > low) | ((b_tied != 0) & (b_rank < missing))
        tl.store(kept + o_entry, m_keep.to(tl.int8), mask=o_entry < size)
        tied_before += tl.sum(b_tied, 0)


@triton.jit
def _entries(values, o_entry, size):
    """Values and bit patterns; of entries that are no candidates 0 and negative."""
    b_value = tl.load(values + o_entry, mask=o_entry < size, other=-1.0)
    b_value = tl.where(b_value == b_value, b_value, 0.0)
    return tl.maximum(b_value, 0.0), b_value.to(tl.int32, bitcast=True)


@triton.jit
def share_of_sum(total, share):
    """`share` of the total; for a share of 1 more than any total, so that every candidate is kept."""
    return tl.where(share >= 1, 1e12, total * share)


@triton.jit
def missing_entries(bits, gap):
    """Count the entries of one bit pattern that fill a gap; a huge number for entries of value 0."""
    value = bits.to(tl.float32, bitcast=True).to(tl.float64)
    number = tl.where(value > 0, tl.ceil(gap / tl.where(value > 0, value, 1.0)), 1e9)
    number = tl.where(gap <= 0, 0.0, number)
    return tl.minimum(tl.maximum(number, 0.0), 1e9).to(tl.int32)


@triton.jit
def refined_threshold(b_totals, goal, low, above, step, DIGITS: tl.constexpr):
    """The highest ``low + digit * step`` with a sum that reaches the goal, and the sum of the entries above its digit."""
    digit = tl.maximum(tl.sum((b_totals >= goal).to(tl.int32), 0) - 1, 0)
    if digit < DIGITS - 1:
        above = tl.sum(tl.where(tl.arange(0, DIGITS) == digit + 1, b_totals, 0.0), 0)
    return low + digit * step, above
