"""Triton kernels for top-p over the pooled map, of a head's whole map or of each row, without a sort (`top_p_kernel`)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from flexmask.base.blocks import BlockProblem
from flexmask.block_masks.flexprefill.large_map_top_p_kernels import TILE, large_map_top_p
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


def top_p_map(problem: BlockProblem, values: Tensor, active: Tensor, gamma: Tensor) -> Tensor:
    """Each active head's heaviest blocks of `pooled_map` up to gamma of the sum; of equal ones the first. int8, as written."""
    batch, num_heads, num_q_blocks, num_kv_blocks = values.shape
    heads, q_edges = batch * num_heads, problem.packed_edges.q_edges
    sizes = (num_heads, num_q_blocks, num_kv_blocks)
    chosen = values.new_empty(values.shape, dtype=torch.int8)
    if num_q_blocks * num_kv_blocks <= SMALL_MAP:
        _small_map_kernel[(heads,)](
            values, active, q_edges, gamma, chosen, *sizes,
            BLOCK_SIZE=problem.block_size, PASSES=BITS // _SMALL, DIGIT_BITS=_SMALL, SIZE=SMALL_MAP, num_warps=16,
        )  # fmt: skip
        return chosen
    digit_bits, chunks = _MEDIUM if num_q_blocks * num_kv_blocks <= MEDIUM_MAP else _LARGE
    large_map_top_p(problem, values, active, gamma, chosen, digit_bits, chunks)
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
    """`top_p_map` of each row, up to `share`, (num_heads,), of its sum, at most `max_blocks`."""
    batch, num_heads, num_q_blocks, num_kv_blocks = values.shape
    chosen, q_edges = values.new_empty(values.shape, dtype=torch.int8), problem.packed_edges.q_edges
    _rows_kernel[(num_q_blocks, batch * num_heads)](
        values, active, q_edges, share, chosen, num_heads, num_q_blocks, num_kv_blocks,
        num_kv_blocks + 1 if max_blocks is None else max_blocks,
        BLOCK_SIZE=problem.block_size, TILE=TILE,
    )  # fmt: skip
    return chosen
