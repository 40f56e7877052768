"""The steps of hybrid selection as Triton kernels; the evidence of all rows is in `row_evidence_kernel`."""

from __future__ import annotations

import struct

import torch
import triton
import triton.language as tl
from torch import Tensor

from flexmask.base.blocks import BlockProblem, Number, is_off
from flexmask.block_masks.hybrid.plain import HALVINGS, SLACK, Rule, Thresholds
from flexmask.block_masks.hybrid.row_evidence_kernel import SplitMeans, squares_of_shares
from flexmask.block_masks.hybrid.row_evidence_kernel import row_coverage as row_coverage
from flexmask.block_masks.hybrid.row_evidence_kernel import row_evidence as row_evidence
from flexmask.kernels import MOST_BLOCKS, Blocks
from flexmask.kernels.launch import cdiv, kernel, next_power_of_2
from flexmask.kernels.representative import RepresentativeMass
from flexmask.kernels.vertical_slash import LINES_PER_PROGRAM, diagonal_sums, key_block_shares, load_rows
from flexmask.kernels.visibility import kv_edges_of, q_edges_of

_Q_BLOCKS = 128
_COLUMNS = 512  # key blocks at a time


@triton.jit
def _power(base, exponent):
    return tl.exp2(exponent * tl.log2(base))


@kernel
def _thresholds_kernel(
    gamma,  # read if BY_HEAD
    gamma_bits,  # of the float64
    q_edges,
    of_lines,  # (2, batch, num_heads) float64
    of_rows,  # (batch, num_heads, num_q_blocks) float64
    num_heads, num_q_blocks,
    REFERENCE: tl.constexpr, GAMMA: tl.constexpr, LONGER: tl.constexpr, MOST_LONGER: tl.constexpr, KEY_BLOCK: tl.constexpr,
    DIAGONAL: tl.constexpr, ROWS: tl.constexpr, EARLIER_ROWS: tl.constexpr, FIRST_ROWS: tl.constexpr, BY_HEAD: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1)
    batch = tl.program_id(2)
    # float64 throughout: a number of Python becomes float32
    zero = tl.full([], 0.0, tl.float64)
    one = tl.full([], 1.0, tl.float64)
    reference = tl.full([], REFERENCE, tl.float64)
    of_default = one - tl.full([], GAMMA, tl.float64)
    p_seen = q_edges_of(q_edges, batch, num_q_blocks) + 5 * num_q_blocks
    b_most = tl.zeros([TILE], tl.int32)
    for start in range(0, num_q_blocks, TILE):
        o_q = start + tl.arange(0, TILE)
        b_most = tl.maximum(b_most, tl.load(p_seen + o_q, mask=o_q < num_q_blocks, other=0))
    most = tl.max(b_most, 0).to(tl.float64)
    at_least_one = tl.maximum(most, one)

    # Triton takes a number of Python as float32
    left = one - (tl.load(gamma + head) if BY_HEAD else gamma_bits.to(tl.int64).to(tl.float64, bitcast=True))
    longer = tl.full([], LONGER, tl.float64) * tl.log2(tl.maximum(most / reference, one))
    longer = tl.minimum(longer, tl.full([], MOST_LONGER, tl.float64))
    base = tl.minimum(tl.maximum(left, tl.full([], 1e-6, tl.float64)) / of_default, one)
    g = left * _power(base, longer)
    share = g * tl.minimum(reference / at_least_one, one + one)
    power = tl.full([], EARLIER_ROWS, tl.float64) * tl.maximum(one - reference / at_least_one, zero)
    of_gamma = of_default / tl.maximum(g, tl.full([], 1e-12, tl.float64))

    o_q = tl.program_id(0) * TILE + tl.arange(0, TILE)
    m_q = o_q < num_q_blocks
    b_seen = tl.maximum(tl.load(p_seen + o_q, mask=m_q, other=1), 1).to(tl.float64)
    b_ratio = tl.full([], FIRST_ROWS, tl.float64) * reference / b_seen
    b_first = tl.maximum(b_ratio * b_ratio * b_ratio * of_gamma, one)
    # of a batch row that sees nothing, most is 0
    b_earlier = tl.where(most > 0, _power(tl.maximum(most, one) / b_seen * b_first, power), one)
    b_least = tl.full([], ROWS, tl.float64) * share * b_earlier
    tl.store(of_rows + (batch * num_heads + head) * num_q_blocks + o_q, b_least, mask=m_q)
    if tl.program_id(0) == 0:
        p_lines = of_lines + batch * num_heads + head
        tl.store(p_lines, tl.full([], KEY_BLOCK, tl.float64) * share)
        tl.store(p_lines + tl.num_programs(2) * num_heads, tl.full([], DIAGONAL, tl.float64) * share)


def thresholds(problem: BlockProblem, gamma: Number, rule: Rule) -> Thresholds:
    """As `flexmask.block_masks.hybrid.plain.thresholds`; a number holds for all heads."""
    q_edges, num_heads, by_head = problem.edges.q_edges, problem.inputs.query.shape[1], isinstance(gamma, Tensor)
    batch, _, num_q_blocks = q_edges.shape
    lines, rows = (
        q_edges.new_empty(shape, dtype=torch.float64) for shape in ((2, batch, num_heads), (batch, num_heads, num_q_blocks))
    )
    _thresholds_kernel[(cdiv(num_q_blocks, _Q_BLOCKS), num_heads, batch)](
        gamma if by_head else q_edges, 0 if by_head else struct.unpack("q", struct.pack("d", gamma))[0],
        q_edges, lines, rows, num_heads, num_q_blocks,
        rule.length / problem.block_size, rule.gamma, rule.longer, rule.most_longer, rule.key_block, rule.diagonal, rule.rows,
        rule.earlier_rows, rule.first_rows, BY_HEAD=by_head, TILE=_Q_BLOCKS, num_warps=2,
    )  # fmt: skip
    return Thresholds(lines, rows)


@kernel
def _line_kernel(
    sums, norms, last_rows, kv_edges,
    thresholds,  # (2, batch, num_heads)
    kept,  # int8; for FAMILY 1, block diagonals, the key blocks are read
    num_heads, num_kv_blocks, near,
    FAMILY: tl.constexpr, BLOCK_SIZE: tl.constexpr, PADDED_SIZE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1).to(tl.int64)
    batch = tl.program_id(1) // num_heads
    head_of_family = FAMILY * tl.num_programs(1) + head
    o_line = tl.program_id(0) * TILE + tl.arange(0, TILE)
    threshold = tl.load(thresholds + head_of_family).to(tl.float32)
    b_base, b_factor, b_own, num_rows = load_rows(norms, last_rows, head, batch, BLOCK_SIZE, PADDED_SIZE)
    if FAMILY == 1:
        b_total = diagonal_sums(
            sums, kept, b_base, b_factor, b_own, head, o_line[:, None], near, num_kv_blocks, BLOCK_SIZE, PADDED_SIZE,
            LEAVES_OUT=True,
        )  # fmt: skip
        b_share = b_total / num_rows
    else:
        b_shares = key_block_shares(sums, b_base, b_factor, head, o_line[:, None], num_kv_blocks, BLOCK_SIZE, PADDED_SIZE)
        # NaN must not be lost in a maximum
        b_share = tl.where(tl.sum((b_shares != b_shares).to(tl.int32), 1) > 0, float("nan"), tl.max(b_shares, 1))
    m_line = o_line < num_kv_blocks
    p_candidates = kv_edges_of(kv_edges, batch, num_kv_blocks) + (3 + FAMILY) * num_kv_blocks
    m_candidate = tl.load(p_candidates + o_line, mask=m_line, other=0) != 0
    # NaN drops nothing
    m_keep = ((b_share < threshold) == 0) & m_candidate
    tl.store(kept + head_of_family * num_kv_blocks + o_line, m_keep.to(tl.int8), mask=m_line)


def last_rows_lines(problem: BlockProblem, last: RepresentativeMass, thresholds: Tensor, near: int) -> Tensor:
    """As `flexmask.block_masks.hybrid.plain.last_rows_lines`."""
    batch, num_heads, blocks, block_size, _ = last.sums.shape
    kept = last.sums.new_empty((2, batch, num_heads, blocks), dtype=torch.int8)
    for family in range(2):
        _line_kernel[(cdiv(blocks, LINES_PER_PROGRAM), batch * num_heads)](
            last.sums, last.norms, last.rows, problem.edges.kv_edges, thresholds, kept,
            num_heads, blocks, min(near, MOST_BLOCKS),
            FAMILY=family, BLOCK_SIZE=block_size, PADDED_SIZE=next_power_of_2(block_size), TILE=LINES_PER_PROGRAM,
        )  # fmt: skip
    return kept


@kernel
def _row_blocks_kernel(
    squares,  # from squares_of_shares
    number, q_edges,
    thresholds,  # (batch, num_heads, num_q_blocks)
    codes,  # int8
    min_coverage,  # float64, read if COVERAGE_IS_READ
    num_heads, num_q_blocks, num_kv_blocks, max_distance,
    coverage,  # min_coverage as a number
    of_lines,  # share of its threshold at which a query block takes lines
    BLOCK_SIZE: tl.constexpr, COLUMNS: tl.constexpr, HAS_COVERAGE: tl.constexpr, COVERAGE_IS_READ: tl.constexpr,
    HALVINGS: tl.constexpr, SLACK: tl.constexpr,
):  # fmt: skip
    # long rows first
    q_block = tl.num_programs(0) - 1 - tl.program_id(0)
    batch_head = tl.program_id(1).to(tl.int64)
    batch = batch_head // num_heads
    map_row = batch_head * num_q_blocks + q_block
    p_q_edges = q_edges_of(q_edges, batch, num_q_blocks) + q_block
    end = tl.load(p_q_edges) // BLOCK_SIZE + 1
    begin = tl.maximum(tl.load(p_q_edges + num_q_blocks) - max_distance, 0) // BLOCK_SIZE
    tiles = tl.cdiv(tl.maximum(end - begin, 0), COLUMNS)
    p_squares = squares + map_row * num_kv_blocks
    p_codes = codes + map_row * num_kv_blocks
    o_column = begin + tl.arange(0, COLUMNS)

    # thresholds of the sum of squares
    squared_rows = tl.maximum(tl.load(number + map_row), 1).to(tl.float64)
    least = tl.load(thresholds + map_row).to(tl.float64)
    least_of_rows = (squared_rows * least * least).to(tl.float32)
    least *= tl.cast(of_lines, tl.float64)
    least_of_lines = (squared_rows * least * least).to(tl.float32)

    b_evidence = tl.zeros([COLUMNS], tl.float32)
    b_held = tl.zeros([COLUMNS], tl.float32)
    for tile in tl.range(0, tiles):
        o_kv = o_column + tile * COLUMNS
        b_square = tl.load(p_squares + o_kv, mask=o_kv < end, other=0.0)
        # NaN drops nothing
        b_takes_lines = ((b_square < least_of_lines) == 0).to(tl.int8)
        m_chosen = (b_square < least_of_rows) == 0
        tl.store(p_codes + o_kv, b_takes_lines + 2 * m_chosen.to(tl.int8), mask=o_kv < end)
        if HAS_COVERAGE:
            b_share = tl.sqrt(b_square)
            b_evidence += b_share
            b_held += tl.where(m_chosen, b_share, 0.0)
    if HAS_COVERAGE:
        needed = (tl.load(min_coverage).to(tl.float32) if COVERAGE_IS_READ else coverage) * tl.sum(b_evidence, 0)
        held = tl.sum(b_held, 0)
        if held < needed:
            # Triton carries no variable over a loop that sets it to the value of another from before
            least_now = least_of_rows * 1.0
            added = tl.sum(tl.zeros([COLUMNS], tl.int32), 0)
            share = needed * 0.0
            halving = 0
            while (halving < HALVINGS) & (held < needed):
                b_held = tl.zeros([COLUMNS], tl.float32)
                b_added = tl.zeros([COLUMNS], tl.int32)
                for tile in tl.range(0, tiles):
                    o_kv = o_column + tile * COLUMNS
                    b_square = tl.load(p_squares + o_kv, mask=o_kv < end, other=0.0)
                    m_reaches = (o_kv < end) & ((b_square < 0.25 * least_now) == 0)
                    b_held += tl.where(m_reaches, tl.sqrt(b_square), 0.0)
                    b_added += (m_reaches & (b_square < least_now)).to(tl.int32)
                more = tl.sum(b_held, 0)
                share = (needed - held) / tl.where(more > held, more - held, 1.0)
                added = tl.sum(b_added, 0)
                held = more
                least_now *= 0.25
                halving += 1
            # of those that the last halving adds the nearest stay: key blocks ascend
            dropped = (added.to(tl.float32) - tl.ceil(added.to(tl.float32) * share - SLACK)).to(tl.int32)
            # beyond the last halving every block counts
            least_before = tl.where(held < needed, 0.0, 4.0 * least_now)
            seen = tl.sum(tl.zeros([COLUMNS], tl.int32), 0)
            for tile in tl.range(0, tiles):
                o_kv = o_column + tile * COLUMNS
                b_square = tl.load(p_squares + o_kv, mask=o_kv < end, other=0.0)
                b_is_added = ((o_kv < end) & ((b_square < least_now) == 0) & (b_square < least_before)).to(tl.int32)
                m_stays = ((b_square < least_before) == 0) | ((b_is_added != 0) & (seen + tl.cumsum(b_is_added, 0) > dropped))
                seen += tl.sum(b_is_added, 0)
                b_takes_lines = ((b_square < least_of_lines) == 0).to(tl.int8)
                tl.store(p_codes + o_kv, b_takes_lines + 2 * m_stays.to(tl.int8), mask=o_kv < end)


def row_blocks(problem: BlockProblem, split: SplitMeans, thresholds: Tensor, of_lines: float, min_coverage: Number) -> Blocks:
    """As `flexmask.block_masks.hybrid.plain.row_blocks`; codes without visible pairs may be unwritten."""
    squares, number = squares_of_shares(problem, split)
    codes = torch.empty_like(squares, dtype=torch.int8)
    batch, num_heads, num_q_blocks, num_kv_blocks = squares.shape
    is_read = isinstance(min_coverage, Tensor)
    _row_blocks_kernel[(num_q_blocks, batch * num_heads)](
        squares, number, problem.edges.q_edges, thresholds, codes, min_coverage if is_read else number, num_heads,
        num_q_blocks, num_kv_blocks, problem.inputs.max_distance, 0.0 if is_read else float(min_coverage), of_lines,
        BLOCK_SIZE=problem.block_size, COLUMNS=_COLUMNS, HAS_COVERAGE=not is_off(min_coverage), COVERAGE_IS_READ=is_read,
        HALVINGS=HALVINGS, SLACK=SLACK, num_warps=4,
    )  # fmt: skip
    return Blocks(codes, gated=True)
