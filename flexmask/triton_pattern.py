"""Triton kernel for the pattern of each head and the lines it keeps: `flexmask.pattern` and `flexmask.vertical_slash` in one."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from flexmask.triton_fewest import keep_fewest
from flexmask.triton_scores import soft_capped


class Lines(NamedTuple):
    """The decisions of each head."""

    is_query_aware: Tensor  # (batch, num_heads) bool
    distance: Tensor  # (batch, num_heads) float32
    kept: Tensor  # (2, batch, num_heads, num_kv_blocks) int8: key blocks, block diagonals
    number: Tensor  # (2, batch, num_heads) int64: how many of either


@triton.jit
def _weighted_scores(
    scores, key_count, member, block, num_kv_blocks, scale, softcap, MEMBERS: tl.constexpr, HAS_SOFTCAP: tl.constexpr
):
    """Pooled scores of key blocks by member, -inf where no row sees any of it."""
    exists = block < num_kv_blocks
    place = member[:, None] * num_kv_blocks + block[None, :]
    raw = tl.load(scores + place, mask=(member < MEMBERS)[:, None] & exists[None, :], other=float("-inf"))
    count = tl.load(key_count + block, mask=exists, other=0)[None, :]
    seen = (raw != float("-inf")) & (count > 0)
    score = tl.where(seen, raw, 0.0) * scale
    if HAS_SOFTCAP:
        score = soft_capped(score, softcap)
    return tl.where(seen, score + tl.log(tl.maximum(count, 1).to(tl.float32)), float("-inf"))


@triton.jit
def _relative_entropy(p, q):
    """Terms of the relative entropy of p to q."""
    return tl.where(p == 0, 0.0, p * tl.log(tl.where(p == 0, 1.0, p) / tl.where(p == 0, 1.0, q)))


@triton.jit
def _pattern_kernel(
    # (batch, num_heads * MEMBERS, num_kv_blocks) float32: unscaled scores; -inf: no pattern row sees any of the block. A head
    # here stands for MEMBERS neighbours, whose estimates it takes the mean of
    estimate,
    attended,  # (batch, num_heads, num_kv_blocks) float32: V of the pattern rows; -1: no candidate
    rows,  # (batch or 1, 1 + block_size) int32: an offset, then the pattern rows, -1 where not taken
    key_count,  # (batch or 1, num_kv_blocks) int32
    lines,  # (2, batch, num_heads, num_kv_blocks) float32; -1: no candidate
    gamma,  # 0-d float64
    tau,  # 0-d float64
    is_query_aware,
    distance,
    kept,
    count,
    rows_stride,  # between batch rows; 0 where all agree
    block_stride,
    heads,  # batch * num_heads
    num_heads,
    num_kv_blocks,
    cap,
    floor,
    scale,
    softcap,
    HAS_SOFTCAP: tl.constexpr,
    MEMBERS: tl.constexpr,
    PADDED_MEMBERS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    PADDED_SIZE: tl.constexpr,
    TILE: tl.constexpr,
):
    # compilers hand Python's floats over in float64
    scale = tl.cast(scale, tl.float32)
    softcap = tl.cast(softcap, tl.float32)
    family = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    batch = head // num_heads
    slot = tl.arange(0, PADDED_SIZE)
    num_taken = tl.sum((tl.load(rows + batch * rows_stride + 1 + slot, mask=slot < BLOCK_SIZE, other=-1) >= 0).to(tl.int32), 0)

    member = tl.arange(0, PADDED_MEMBERS)
    scores = estimate + head * MEMBERS * num_kv_blocks
    row_count = key_count + batch * block_stride
    lane = tl.arange(0, TILE)
    highest = tl.full([PADDED_MEMBERS], float("-inf"), tl.float32)
    total = tl.zeros([PADDED_MEMBERS], tl.float32)
    for start in range(0, num_kv_blocks, TILE):
        score = _weighted_scores(
            scores, row_count, member, start + lane, num_kv_blocks, scale, softcap, MEMBERS=MEMBERS, HAS_SOFTCAP=HAS_SOFTCAP
        )
        higher = tl.maximum(highest, tl.max(score, 1))
        base = tl.where(higher == float("-inf"), 0.0, higher)
        total = total * tl.exp(highest - base) + tl.sum(tl.exp(score - base[:, None]), 1)
        highest = higher
    base = tl.where(highest == float("-inf"), 0.0, highest)
    total = tl.where(total == 0, 1.0, total)
    divergence = tl.zeros([TILE], tl.float32)
    for start in range(0, num_kv_blocks, TILE):
        block = start + lane
        score = _weighted_scores(
            scores, row_count, member, block, num_kv_blocks, scale, softcap, MEMBERS=MEMBERS, HAS_SOFTCAP=HAS_SOFTCAP
        )
        estimated = tl.sum(tl.exp(score - base[:, None]) / total[:, None], 0) / MEMBERS
        held = tl.load(attended + head * num_kv_blocks + block, mask=block < num_kv_blocks, other=0.0)
        held = tl.where(held < 0, 0.0, held)
        middle = (estimated + held) / 2
        divergence += _relative_entropy(estimated, middle) + _relative_entropy(held, middle)
    jsd = tl.sum(divergence, 0) / 2
    # a comparison with NaN is false: it stays NaN, and the head is not query-aware
    d = tl.sqrt(tl.where(jsd < 0, 0.0, jsd))
    query_aware = (d.to(tl.float64) < tl.load(tau)) & (num_taken > 0)
    if family == 0:
        tl.store(is_query_aware + head, query_aware)
        tl.store(distance + head, d)

    share = tl.where(query_aware, -1.0, tl.load(gamma))
    row = (family * heads + head) * num_kv_blocks
    number = keep_fewest(lines + row, kept + row, num_kv_blocks, share, cap, floor, TILE=TILE)
    tl.store(count + family * heads + head, number.to(tl.int64))


def pattern_and_lines(
    estimate: Tensor,
    attended: Tensor,
    rows: Tensor,
    key_count: Tensor,
    lines: Tensor,
    gamma: Tensor,
    tau: Tensor,
    min_blocks: int,
    max_blocks: int | None,
    scale: float,
    softcap: float | None,
) -> Lines:
    """Decide each head's pattern and keep its lines; a query-aware head keeps the floor of lines alone.

    Where the heads of a group share a mask by their mean, a head here is a group, and `attended` and `lines` are means already.

    Parameters
    ----------
    estimate
        (batch, num_heads * members, num_kv_blocks) float32, from `estimated_scores` of the pattern rows, by member.
    attended
        (batch, num_heads, num_kv_blocks) float32: V of the pattern rows, likewise.
    rows
        (batch or 1, 1 + block_size) int32: the pattern rows, from `packed_rows`.
    key_count
        (batch or 1, num_kv_blocks) int32: valid keys.
    lines
        (2, batch, num_heads, num_kv_blocks) float32: V and S of the index rows, -1 where no row sees a line.
    gamma, tau
        0-d float64.
    min_blocks, max_blocks
        Floor and cap of either family, in lines.
    scale, softcap
        As in attention.
    """
    _, batch, num_heads, blocks = lines.shape
    heads, members = batch * num_heads, estimate.shape[1] // num_heads
    block_size = rows.shape[1] - 1
    is_query_aware = lines.new_empty((batch, num_heads), dtype=torch.bool)
    distance = lines.new_empty((batch, num_heads))
    kept = lines.new_empty(lines.shape, dtype=torch.int8)
    count = lines.new_empty((2, batch, num_heads), dtype=torch.int64)
    _pattern_kernel[(2, heads)](
        estimate,
        attended,
        rows,
        key_count,
        lines,
        gamma,
        tau,
        is_query_aware,
        distance,
        kept,
        count,
        1 + block_size if rows.shape[0] > 1 else 0,
        blocks if key_count.shape[0] > 1 else 0,
        heads,
        num_heads,
        blocks,
        blocks + 1 if max_blocks is None else max_blocks,
        min_blocks,
        scale,
        1.0 if softcap is None else softcap,
        HAS_SOFTCAP=softcap is not None,
        MEMBERS=members,
        PADDED_MEMBERS=1 << (members - 1).bit_length(),
        BLOCK_SIZE=block_size,
        PADDED_SIZE=1 << (block_size - 1).bit_length(),
        TILE=64,
        num_warps=8,
    )
    return Lines(is_query_aware, distance, kept, count)
