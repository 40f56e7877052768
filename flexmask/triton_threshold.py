"""Triton search for the smallest kept value of a cumulative selection, without a sort.

The fewest entries whose sum reaches a goal are those at or above some value. Non-negative floats order as their bit patterns do,
so that value is found digit by digit: each of six passes sums the entries at or above 32 thresholds, in chunks, and the next pass
picks the digit from the chunks' sums. Sums are float32 within a chunk and float64 over chunks, in a fixed order, without atomics.
Heads that are not active cost nothing: their programs return at once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_DIGIT_BITS = 5
_PASSES = 6  # 30 bits: values up to 1.0 have the bit pattern 0x3F800000, below 2**30
_TILE = 256
_TILES_PER_CHUNK = 32


@triton.jit
def _digit_from_sums(sums, previous_low, goal, chunks, STEP: tl.constexpr, DIGITS: tl.constexpr, PADDED_CHUNKS: tl.constexpr):
    """Largest threshold ``previous_low + digit * STEP`` whose entries reach the goal."""
    chunk = tl.arange(0, PADDED_CHUNKS)
    digit = tl.arange(0, DIGITS)
    parts = tl.load(sums + chunk[:, None] * DIGITS + digit[None, :], mask=chunk[:, None] < chunks, other=0.0)
    totals = tl.sum(parts.to(tl.float64), 0)
    reached = tl.sum((totals >= goal).to(tl.int32), 0)
    return previous_low + tl.maximum(reached - 1, 0) * STEP


@triton.jit
def _digit_pass_kernel(
    values,  # (heads, size) float32 >= 0
    active,  # (heads,) int8
    gamma,  # (1,) float64
    lows,  # (passes + 1, heads) int32
    goals,  # (heads,) float64
    sums,  # (passes, heads, chunks, DIGITS) float32
    heads,
    size,
    chunks,
    PASS: tl.constexpr,
    PASSES: tl.constexpr,
    DIGIT_BITS: tl.constexpr,
    TILE: tl.constexpr,
    TILES_PER_CHUNK: tl.constexpr,
    PADDED_CHUNKS: tl.constexpr,
):
    DIGITS: tl.constexpr = 1 << DIGIT_BITS
    STEP: tl.constexpr = 1 << (DIGIT_BITS * (PASSES - 1 - PASS))
    chunk = tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)
    if tl.load(active + head) != 0:
        low = 0
        if PASS > 0:
            previous = sums + ((PASS - 1) * heads + head) * chunks * DIGITS
            if PASS == 1:
                chunk_of = tl.arange(0, PADDED_CHUNKS)
                everything = tl.load(previous + chunk_of * DIGITS, mask=chunk_of < chunks, other=0.0)
                goal = tl.sum(everything.to(tl.float64), 0) * tl.load(gamma)
                if chunk == 0:
                    tl.store(goals + head, goal)
            else:
                goal = tl.load(goals + head)
            low = tl.load(lows + (PASS - 1) * heads + head)
            low = _digit_from_sums(previous, low, goal, chunks, STEP << DIGIT_BITS, DIGITS, PADDED_CHUNKS)
            if chunk == 0:
                tl.store(lows + PASS * heads + head, low)
        digit = tl.arange(0, DIGITS)
        thresholds = low + digit * STEP
        parts = tl.zeros([DIGITS, TILE], tl.float32)
        for tile in range(TILES_PER_CHUNK):
            place = (chunk * TILES_PER_CHUNK + tile) * TILE + tl.arange(0, TILE)
            value = tl.load(values + head * size + place, mask=place < size, other=0.0)
            bits = value.to(tl.int32, bitcast=True)
            parts += tl.where(bits[None, :] >= thresholds[:, None], value[None, :], 0.0)
        tl.store(sums + ((PASS * heads + head) * chunks + chunk) * DIGITS + digit, tl.sum(parts, 1))


@triton.jit
def _last_digit_kernel(
    active, lows, goals, sums, threshold, heads, chunks,
    PASSES: tl.constexpr, DIGIT_BITS: tl.constexpr, PADDED_CHUNKS: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0).to(tl.int64)
    low = 1 << 30  # above every value: an inactive head keeps nothing
    if tl.load(active + head) != 0:
        last = sums + ((PASSES - 1) * heads + head) * chunks * (1 << DIGIT_BITS)
        low = tl.load(lows + (PASSES - 1) * heads + head)
        low = _digit_from_sums(last, low, tl.load(goals + head), chunks, 1, 1 << DIGIT_BITS, PADDED_CHUNKS)
    tl.store(threshold + head, low)


def launch_threshold(values: Tensor, active: Tensor, gamma: Tensor) -> tuple[Tensor, Tensor]:
    """Run the passes; see `threshold`."""
    heads, size = values.shape
    device = values.device
    chunks = triton.cdiv(size, _TILE * _TILES_PER_CHUNK)
    lows = torch.zeros((_PASSES, heads), dtype=torch.int32, device=device)
    goals = torch.zeros(heads, dtype=torch.float64, device=device)
    sums = torch.empty((_PASSES, heads, chunks, 1 << _DIGIT_BITS), dtype=torch.float32, device=device)
    result = torch.empty(heads, dtype=torch.int32, device=device)
    values, active, gamma = values.contiguous(), active.to(torch.int8), gamma.reshape(1)
    padded = triton.next_power_of_2(chunks)
    for digit_pass in range(_PASSES):
        _digit_pass_kernel[(chunks, heads)](
            values, active, gamma, lows, goals, sums, heads, size, chunks,
            PASS=digit_pass, PASSES=_PASSES, DIGIT_BITS=_DIGIT_BITS, TILE=_TILE, TILES_PER_CHUNK=_TILES_PER_CHUNK,
            PADDED_CHUNKS=padded,
        )  # fmt: skip
    _last_digit_kernel[(heads,)](
        active, lows, goals, sums, result, heads, chunks, PASSES=_PASSES, DIGIT_BITS=_DIGIT_BITS, PADDED_CHUNKS=padded
    )
    return result, goals


@torch.library.custom_op("flexmask::threshold", mutates_args=())
def threshold(values: Tensor, active: Tensor, gamma: Tensor) -> tuple[Tensor, Tensor]:
    """Bit pattern of the smallest value among the fewest entries whose sum reaches gamma times the sum of all.

    Parameters
    ----------
    values
        (heads, size) float32 in [0, 1], without NaN.
    active
        (heads,) bool: heads to search; the others get 2**30, above every value.
    gamma
        0-d float64.

    Returns
    -------
    tuple of Tensor
        (heads,) int32 bit patterns, and the goals, (heads,) float64.
    """
    return launch_threshold(values, active, gamma)


@threshold.register_fake
def _(values, active, gamma):
    heads = values.shape[0]
    return values.new_empty(heads, dtype=torch.int32), values.new_empty(heads, dtype=torch.float64)
