"""Triton kernel for the key blocks that rows choose by thresholds and their floor: a program per row of blocks."""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from flexmask.base.blocks import BlockProblem
from flexmask.block_masks.hybrid.plain import HALVINGS, SLACK
from flexmask.block_masks.hybrid.row_evidence_kernel import RowEvidence, squares_of_shares
from flexmask.kernels.block_lists import Blocks
from flexmask.kernels.launch import kernel
from flexmask.kernels.visibility import q_edges_of

# key blocks at a time
_COLUMNS = 512


@kernel
def _row_blocks_kernel(
    squares,  # from squares_of_shares
    number, q_edges,
    thresholds,  # (batch, num_heads, num_q_blocks)
    codes,  # int8
    min_coverage,  # float64, read if FLOOR_IS_READ
    num_heads, num_q_blocks, num_kv_blocks, max_distance,
    floor,  # min_coverage as a number
    of_lines,  # share of its threshold at which a query block takes lines
    BLOCK_SIZE: tl.constexpr, COLUMNS: tl.constexpr, HAS_FLOOR: tl.constexpr, FLOOR_IS_READ: tl.constexpr, HALVINGS: tl.constexpr,
    SLACK: tl.constexpr,
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
        if HAS_FLOOR:
            b_share = tl.sqrt(b_square)
            b_evidence += b_share
            b_held += tl.where(m_chosen, b_share, 0.0)
    if HAS_FLOOR:
        needed = (tl.load(min_coverage).to(tl.float32) if FLOOR_IS_READ else floor) * tl.sum(b_evidence, 0)
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


def row_blocks(
    problem: BlockProblem, evidence: RowEvidence, thresholds: Tensor, of_lines: float, min_coverage: float | Tensor = 0
) -> Blocks:
    """As `flexmask.block_masks.hybrid.plain.row_blocks`; codes without visible pairs may be unwritten."""
    squares, number = squares_of_shares(problem, evidence)
    codes = torch.empty_like(squares, dtype=torch.int8)
    batch, num_heads, num_q_blocks, num_kv_blocks = squares.shape
    is_read = isinstance(min_coverage, Tensor)
    _row_blocks_kernel[(num_q_blocks, batch * num_heads)](
        squares, number, problem.packed_edges.q_edges, thresholds, codes, min_coverage if is_read else number, num_heads,
        num_q_blocks, num_kv_blocks, problem.inputs.max_distance, 0.0 if is_read else float(min_coverage), of_lines,
        BLOCK_SIZE=problem.block_size, COLUMNS=_COLUMNS, HAS_FLOOR=is_read or min_coverage > 0, FLOOR_IS_READ=is_read,
        HALVINGS=HALVINGS, SLACK=SLACK, num_warps=4,
    )  # fmt: skip
    return Blocks(codes, gated=True)
