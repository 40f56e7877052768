"""Triton kernels for V and S: the representative attention, summed over the rows."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from flexmask.base.blocks import BlockProblem
from flexmask.kernels.launch import cdiv, kernel, next_power_of_2
from flexmask.kernels.representative import RepresentativeSums
from flexmask.kernels.visibility import KernelGeometry, candidates_of, kv_edges_of

LINES_PER_PROGRAM = 8


@triton.jit
def load_rows(norms, representative, head, batch, BLOCK_SIZE: tl.constexpr, PADDED_SIZE: tl.constexpr):
    """The rows' base, factor and key blocks, (1, PADDED_SIZE), and their number."""
    o_slot = tl.arange(0, PADDED_SIZE)
    m_slot = o_slot < BLOCK_SIZE
    p_norms = norms + (head * BLOCK_SIZE + o_slot) * 2
    b_base = tl.load(p_norms, mask=m_slot, other=0.0)[None, :]
    b_factor = tl.load(p_norms + 1, mask=m_slot, other=0.0)[None, :]
    b_row = tl.load(representative + batch * (1 + BLOCK_SIZE) + 1 + o_slot, mask=m_slot, other=-1)
    num_rows = tl.maximum(tl.sum((b_row >= 0).to(tl.int32), 0), 1).to(tl.float32)
    # rows not taken sum to 0
    b_own = ((tl.load(representative + batch * (1 + BLOCK_SIZE)) + tl.maximum(b_row, 0)) // BLOCK_SIZE)[None, :]
    return b_base, b_factor, b_own, num_rows


@triton.jit
def key_block_shares(
    sums, b_base, b_factor, head, o_kv, num_kv_blocks, BLOCK_SIZE: tl.constexpr, PADDED_SIZE: tl.constexpr, NUM_SUMS: tl.constexpr
):  # fmt: skip
    """Attention of each row to key blocks `o_kv`, (TILE, 1), as (TILE, PADDED_SIZE)."""
    o_slot = tl.arange(0, PADDED_SIZE)[None, :]
    m_sums = (o_kv < num_kv_blocks) & (o_slot < BLOCK_SIZE)
    p_sums = sums + ((head * num_kv_blocks + o_kv) * BLOCK_SIZE + o_slot) * NUM_SUMS
    b_weight = tl.exp2(tl.load(p_sums, mask=m_sums, other=float("-inf")) - b_base) * b_factor
    return tl.load(p_sums + 1, mask=m_sums, other=0.0) * b_weight


@triton.jit
def diagonal_sums(
    sums, b_base, b_factor, b_own, head,
    o_diagonal,  # (TILE, 1)
    num_kv_blocks, BLOCK_SIZE: tl.constexpr, PADDED_SIZE: tl.constexpr,
):  # fmt: skip
    """Attention of all rows to block diagonals, (TILE,): on d lie key block own - d, and parts of its neighbours."""
    o_slot = tl.arange(0, PADDED_SIZE)[None, :]
    b_shares = tl.zeros_like((b_own - o_diagonal).to(tl.float32))
    for shift in tl.static_range(-1, 2):
        o_kv = b_own - o_diagonal + shift
        m_sums = (o_kv >= 0) & (o_kv < num_kv_blocks) & (o_slot < BLOCK_SIZE)
        p_sums = sums + ((head * num_kv_blocks + o_kv) * BLOCK_SIZE + o_slot) * 4
        b_weight = tl.exp2(tl.load(p_sums, mask=m_sums, other=float("-inf")) - b_base) * b_factor
        if shift == 0:
            b_part = tl.load(p_sums + 1, mask=m_sums, other=0.0)
            b_part -= tl.load(p_sums + 2, mask=m_sums, other=0.0)
            b_part -= tl.load(p_sums + 3, mask=m_sums, other=0.0)
        elif shift == 1:
            b_part = tl.load(p_sums + 2, mask=m_sums, other=0.0)
        else:
            b_part = tl.load(p_sums + 3, mask=m_sums, other=0.0)
        # not a factor of NaN
        b_shares += tl.where(m_sums, b_part * b_weight, 0.0)
    # rounding may leave less than 0; unlike a maximum, this keeps NaN
    b_total = tl.sum(b_shares, 1)
    return tl.where(b_total < 0, 0.0, b_total)


@kernel
def _lines_kernel(
    sums, norms, representative, kv_edges,
    line_mass,  # float32
    num_heads, num_kv_blocks,
    BLOCK_SIZE: tl.constexpr, PADDED_SIZE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1).to(tl.int64)
    batch = tl.program_id(1) // num_heads
    o_line = tl.program_id(0) * TILE + tl.arange(0, TILE)
    b_base, b_factor, b_own, num_rows = load_rows(norms, representative, head, batch, BLOCK_SIZE, PADDED_SIZE)
    b_shares = key_block_shares(sums, b_base, b_factor, head, o_line[:, None], num_kv_blocks, BLOCK_SIZE, PADDED_SIZE, 4)
    b_vertical = tl.sum(b_shares, 1) / num_rows
    b_slash = diagonal_sums(sums, b_base, b_factor, b_own, head, o_line[:, None], num_kv_blocks, BLOCK_SIZE, PADDED_SIZE)
    m_line = o_line < num_kv_blocks
    p_candidates = candidates_of(kv_edges_of(kv_edges, batch, num_kv_blocks), num_kv_blocks) + o_line
    m_vertical = tl.load(p_candidates, mask=m_line, other=0) != 0
    m_slash = tl.load(p_candidates + num_kv_blocks, mask=m_line, other=0) != 0
    p_lines = line_mass + head * num_kv_blocks + o_line
    tl.store(p_lines, tl.where(m_vertical, b_vertical, -1.0), mask=m_line)
    tl.store(p_lines + tl.num_programs(1) * num_kv_blocks, tl.where(m_slash, b_slash / num_rows, -1.0), mask=m_line)


def line_mass(mass: RepresentativeSums, geometry: KernelGeometry) -> Tensor:
    """V by key block and S by block diagonal, (2, batch, num_heads, num_kv_blocks) float32; -1 if no candidate."""
    batch, num_heads, blocks, block_size, _ = mass.sums.shape
    lines = mass.sums.new_empty((2, batch, num_heads, blocks))
    _lines_kernel[(cdiv(blocks, LINES_PER_PROGRAM), batch * num_heads)](
        mass.sums, mass.norms, mass.rows, geometry.kv_edges, lines, num_heads, blocks,
        BLOCK_SIZE=block_size, PADDED_SIZE=next_power_of_2(block_size), TILE=LINES_PER_PROGRAM,
    )  # fmt: skip
    return lines


def coverage(problem: BlockProblem, mass: RepresentativeSums, keep: Tensor) -> Tensor:
    """As `flexmask.plain.coverage`."""
    rows, sums, norms = mass.rows[:, 1:].long(), mass.sums, mass.norms
    q_block = (rows.clamp(min=0) // problem.block_size)[:, None, :, None].expand(*keep.shape[:2], -1, keep.shape[3])
    # in place: each map is as large as a quarter of the sums, without diagonals as half of them
    by_row = sums[..., 0] - norms[..., 0].unsqueeze(-2)
    by_row.exp2_().mul_(sums[..., 1]).mul_(norms[..., 1].unsqueeze(-2))
    in_kept = by_row.mT.masked_fill_(keep.gather(2, q_block).logical_not_(), 0.0).sum((-2, -1))
    return in_kept / (rows >= 0).sum(-1).clamp(min=1)[:, None]
