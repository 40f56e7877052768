"""The steps of hybrid selection as Triton kernels; the evidence of all rows is in `row_evidence_kernel`."""

from __future__ import annotations

import functools
import struct

import torch
import triton
import triton.language as tl
from torch import Tensor

from flexmask.base.blocks import BlockProblem, FloatOption, is_off
from flexmask.base.selection import ChosenBlocks
from flexmask.block_masks.hybrid.plain import HALVINGS, SLACK, RowBlocks
from flexmask.block_masks.hybrid.row_evidence_kernel import row_coverage, squares_of_shares
from flexmask.kernels.launch import cdiv, kernel, next_power_of_2
from flexmask.kernels.pooling import split_key_means
from flexmask.kernels.representative import RepresentativeSums
from flexmask.kernels.vertical_slash import LINES_PER_PROGRAM, key_block_shares, load_rows
from flexmask.kernels.visibility import candidates_of, kv_edges_of, q_edges_of

_COLUMNS = 512  # key blocks at a time


@triton.jit
def _threshold(gamma, gamma_bits, max_seen, head, batch, MULTIPLE: tl.constexpr, BY_HEAD: tl.constexpr):
    """The threshold of a head, float64: `MULTIPLE` times `flexmask.block_masks.hybrid.plain.threshold_unit`."""
    # Triton takes a number of Python as float32
    left = tl.full([], 1.0, tl.float64)
    left -= tl.load(gamma + head) if BY_HEAD else gamma_bits.to(tl.int64).to(tl.float64, bitcast=True)
    return tl.full([], MULTIPLE, tl.float64) * (left / tl.maximum(tl.load(max_seen + batch), 1).to(tl.float64))


def _gamma_arguments(gamma: FloatOption, problem: BlockProblem) -> tuple[Tensor, int, bool]:
    """Gamma as kernels take it: a tensor by head, or the bits of a float64 and any tensor; True if it is by head."""
    if isinstance(gamma, Tensor):
        return gamma, 0, True
    return problem.kernel_geometry.max_seen, struct.unpack("q", struct.pack("d", gamma))[0], False


@kernel
def _key_blocks_kernel(
    sums, norms, last_rows, kv_edges, max_seen,
    gamma,  # read if BY_HEAD
    gamma_bits,  # of the float64
    kept,  # int8
    num_heads, num_kv_blocks,
    MULTIPLE: tl.constexpr, BY_HEAD: tl.constexpr, BLOCK_SIZE: tl.constexpr, PADDED_SIZE: tl.constexpr, TILE: tl.constexpr,
    NUM_SUMS: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1).to(tl.int64)
    batch = tl.program_id(1) // num_heads
    o_kv = tl.program_id(0) * TILE + tl.arange(0, TILE)
    threshold = _threshold(gamma, gamma_bits, max_seen, tl.program_id(1) % num_heads, batch, MULTIPLE, BY_HEAD).to(tl.float32)
    b_base, b_factor, _, _ = load_rows(norms, last_rows, head, batch, BLOCK_SIZE, PADDED_SIZE)
    b_shares = key_block_shares(sums, b_base, b_factor, head, o_kv[:, None], num_kv_blocks, BLOCK_SIZE, PADDED_SIZE, NUM_SUMS)
    # NaN must not be lost in a maximum
    b_largest = tl.where(tl.sum((b_shares != b_shares).to(tl.int32), 1) > 0, float("nan"), tl.max(b_shares, 1))
    m_kv = o_kv < num_kv_blocks
    p_candidates = candidates_of(kv_edges_of(kv_edges, batch, num_kv_blocks), num_kv_blocks)
    m_candidate = tl.load(p_candidates + o_kv, mask=m_kv, other=0) != 0
    # NaN drops nothing
    m_keep = ((b_largest < threshold) == 0) & m_candidate
    tl.store(kept + head * num_kv_blocks + o_kv, m_keep.to(tl.int8), mask=m_kv)


def key_blocks(problem: BlockProblem, mass: RepresentativeSums, gamma: FloatOption, multiple: float) -> Tensor:
    """As `flexmask.block_masks.hybrid.plain.key_blocks`, int8; a number holds for all heads."""
    batch, num_heads, blocks, block_size, _ = mass.sums.shape
    kept = mass.sums.new_empty((1, batch, num_heads, blocks), dtype=torch.int8)
    geometry, (gamma_tensor, gamma_bits, is_by_head) = problem.kernel_geometry, _gamma_arguments(gamma, problem)
    _key_blocks_kernel[(cdiv(blocks, LINES_PER_PROGRAM), batch * num_heads)](
        mass.sums, mass.norms, mass.rows, geometry.kv_edges, geometry.max_seen, gamma_tensor, gamma_bits, kept, num_heads, blocks,
        MULTIPLE=float(multiple), BY_HEAD=is_by_head, BLOCK_SIZE=block_size, PADDED_SIZE=next_power_of_2(block_size),
        TILE=LINES_PER_PROGRAM, NUM_SUMS=mass.sums.shape[4],
    )  # fmt: skip
    return kept


@kernel
def _row_blocks_kernel(
    squares,  # from squares_of_shares
    num_sampled, q_edges, max_seen,
    gamma,  # read if BY_HEAD
    gamma_bits,  # of the float64
    chosen,  # int8
    min_coverage,  # float64, read if COVERAGE_IS_READ
    num_heads, num_q_blocks, num_kv_blocks, distance_limit,
    coverage_number,  # min_coverage as a number
    MULTIPLE: tl.constexpr, BY_HEAD: tl.constexpr, BLOCK_SIZE: tl.constexpr, COLUMNS: tl.constexpr, HAS_COVERAGE: tl.constexpr,
    COVERAGE_IS_READ: tl.constexpr, HALVINGS: tl.constexpr, SLACK: tl.constexpr,
):  # fmt: skip
    # long rows first
    q_block = tl.num_programs(0) - 1 - tl.program_id(0)
    batch_head = tl.program_id(1).to(tl.int64)
    batch = batch_head // num_heads
    map_row = batch_head * num_q_blocks + q_block
    p_q_edges = q_edges_of(q_edges, batch, num_q_blocks) + q_block
    end = tl.load(p_q_edges) // BLOCK_SIZE + 1
    begin = tl.maximum(tl.load(p_q_edges + num_q_blocks) - distance_limit, 0) // BLOCK_SIZE
    tiles = tl.cdiv(tl.maximum(end - begin, 0), COLUMNS)
    p_squares = squares + map_row * num_kv_blocks
    p_chosen = chosen + map_row * num_kv_blocks
    o_column = begin + tl.arange(0, COLUMNS)

    # the threshold of the sum of squares
    threshold = _threshold(gamma, gamma_bits, max_seen, tl.program_id(1) % num_heads, batch, MULTIPLE, BY_HEAD)
    square_threshold = (tl.maximum(tl.load(num_sampled + map_row), 1).to(tl.float64) * threshold * threshold).to(tl.float32)

    b_total = tl.zeros([COLUMNS], tl.float32)
    b_held = tl.zeros([COLUMNS], tl.float32)
    for tile in tl.range(0, tiles):
        o_kv = o_column + tile * COLUMNS
        b_square = tl.load(p_squares + o_kv, mask=o_kv < end, other=0.0)
        # NaN drops nothing
        m_chosen = (b_square < square_threshold) == 0
        tl.store(p_chosen + o_kv, m_chosen.to(tl.int8), mask=o_kv < end)
        if HAS_COVERAGE:
            b_evidence = tl.sqrt(b_square)
            b_total += b_evidence
            b_held += tl.where(m_chosen, b_evidence, 0.0)
    if HAS_COVERAGE:
        needed = (tl.load(min_coverage).to(tl.float32) if COVERAGE_IS_READ else coverage_number) * tl.sum(b_total, 0)
        held = tl.sum(b_held, 0)
        if held < needed:
            # Triton carries no variable over a loop that sets it to the value of another from before
            lower_threshold = square_threshold * 1.0
            added = tl.sum(tl.zeros([COLUMNS], tl.int32), 0)
            missing_share = needed * 0.0
            halving = 0
            while (halving < HALVINGS) & (held < needed):
                b_held = tl.zeros([COLUMNS], tl.float32)
                b_added = tl.zeros([COLUMNS], tl.int32)
                for tile in tl.range(0, tiles):
                    o_kv = o_column + tile * COLUMNS
                    b_square = tl.load(p_squares + o_kv, mask=o_kv < end, other=0.0)
                    m_reaches = (o_kv < end) & ((b_square < 0.25 * lower_threshold) == 0)
                    b_held += tl.where(m_reaches, tl.sqrt(b_square), 0.0)
                    b_added += (m_reaches & (b_square < lower_threshold)).to(tl.int32)
                more = tl.sum(b_held, 0)
                missing_share = (needed - held) / tl.where(more > held, more - held, 1.0)
                added = tl.sum(b_added, 0)
                held = more
                lower_threshold *= 0.25
                halving += 1
            # of the blocks that the last halving adds the nearest stay: key blocks ascend
            dropped = (added.to(tl.float32) - tl.ceil(added.to(tl.float32) * missing_share - SLACK)).to(tl.int32)
            # where no halving suffices every visible block stays
            upper_threshold = tl.where(held < needed, 0.0, 4.0 * lower_threshold)
            num_before = tl.sum(tl.zeros([COLUMNS], tl.int32), 0)
            for tile in tl.range(0, tiles):
                o_kv = o_column + tile * COLUMNS
                b_square = tl.load(p_squares + o_kv, mask=o_kv < end, other=0.0)
                b_is_added = ((o_kv < end) & ((b_square < lower_threshold) == 0) & (b_square < upper_threshold)).to(tl.int32)
                m_stays = ((b_square < upper_threshold) == 0) | (
                    (b_is_added != 0) & (num_before + tl.cumsum(b_is_added, 0) > dropped)
                )
                num_before += tl.sum(b_is_added, 0)
                tl.store(p_chosen + o_kv, m_stays.to(tl.int8), mask=o_kv < end)


def row_blocks(
    problem: BlockProblem, row_stride: int, gamma: FloatOption, multiple: float, min_coverage: FloatOption
) -> RowBlocks:
    """As `flexmask.block_masks.hybrid.plain.row_blocks`; blocks without visible pairs may be unwritten."""
    means = split_key_means(problem)
    squares, num_sampled = squares_of_shares(problem, means, row_stride)
    chosen = torch.empty_like(squares, dtype=torch.int8)
    batch, num_heads, num_q_blocks, num_kv_blocks = squares.shape
    gamma_tensor, gamma_bits, is_by_head = _gamma_arguments(gamma, problem)
    coverage_is_read = isinstance(min_coverage, Tensor)
    _row_blocks_kernel[(num_q_blocks, batch * num_heads)](
        squares, num_sampled, problem.kernel_geometry.q_edges, problem.kernel_geometry.max_seen, gamma_tensor, gamma_bits,
        chosen, min_coverage if coverage_is_read else num_sampled, num_heads, num_q_blocks, num_kv_blocks,
        problem.inputs.distance_limit, 0.0 if coverage_is_read else float(min_coverage),
        MULTIPLE=float(multiple), BY_HEAD=is_by_head, BLOCK_SIZE=problem.block_size, COLUMNS=_COLUMNS,
        HAS_COVERAGE=not is_off(min_coverage), COVERAGE_IS_READ=coverage_is_read, HALVINGS=HALVINGS, SLACK=SLACK, num_warps=4,
    )  # fmt: skip
    return RowBlocks(ChosenBlocks(chosen), functools.partial(row_coverage, problem, means, row_stride))
