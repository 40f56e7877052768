"""Pattern and kept lines of each head in one launch: the twin of `flexmask.plain.pattern` and of `kept_lines`."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from flexmask.base.inputs import AttentionInputs
from flexmask.config import FlexPrefillConfig
from flexmask.kernels.softcap import soft_capped
from flexmask.kernels.top_p import keep_top_p


class Lines(NamedTuple):
    """The decisions of each head."""

    is_query_aware: Tensor  # (batch, num_heads) bool
    distance: Tensor  # (batch, num_heads) float32
    kept: Tensor  # (2, batch, num_heads, num_kv_blocks) int8: key blocks, block diagonals
    number: Tensor  # (2, batch, num_heads) int64: how many of either


@triton.jit
def _weighted_scores(scores, key_count, block, num_kv_blocks, scale, softcap, HAS_SOFTCAP: tl.constexpr):
    """Pooled scores of key blocks, -inf where no row sees any of it."""
    exists = block < num_kv_blocks
    raw = tl.load(scores + block, mask=exists, other=float("-inf"))
    count = tl.load(key_count + block, mask=exists, other=0)
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
    estimate,  # (batch, num_heads, num_kv_blocks) float32: unscaled scores; -inf: no pattern row sees any of the block
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

    scores = estimate + head * num_kv_blocks
    row_count = key_count + batch * block_stride
    lane = tl.arange(0, TILE)
    highest = tl.full([], float("-inf"), tl.float32)
    total = tl.full([], 0.0, tl.float32)
    for start in range(0, num_kv_blocks, TILE):
        score = _weighted_scores(scores, row_count, start + lane, num_kv_blocks, scale, softcap, HAS_SOFTCAP=HAS_SOFTCAP)
        higher = tl.maximum(highest, tl.max(score, 0))
        base = tl.where(higher == float("-inf"), 0.0, higher)
        total = total * tl.exp(highest - base) + tl.sum(tl.exp(score - base), 0)
        highest = higher
    base = tl.where(highest == float("-inf"), 0.0, highest)
    total = tl.where(total == 0, 1.0, total)
    divergence = tl.zeros([TILE], tl.float32)
    for start in range(0, num_kv_blocks, TILE):
        block = start + lane
        score = _weighted_scores(scores, row_count, block, num_kv_blocks, scale, softcap, HAS_SOFTCAP=HAS_SOFTCAP)
        estimated = tl.exp(score - base) / total
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
    number = keep_top_p(lines + row, kept + row, num_kv_blocks, share, cap, floor, TILE=TILE)
    tl.store(count + family * heads + head, number.to(tl.int64))


def pattern_and_lines(
    estimate: Tensor,
    attended: Tensor,
    rows: Tensor,
    key_count: Tensor,
    lines: Tensor,
    gamma: Tensor,
    tau: Tensor,
    config: FlexPrefillConfig,
    inputs: AttentionInputs,
) -> Lines:
    """Decide each head's pattern and keep its lines; a query-aware head keeps the floor of lines alone.

    Nine arguments: this is two steps in one launch, with the inputs of both.

    Parameters
    ----------
    estimate
        (batch, num_heads, num_kv_blocks) float32, from `estimated_scores` of the pattern rows.
    attended
        (batch, num_heads, num_kv_blocks) float32: V of the pattern rows.
    rows
        (batch or 1, 1 + block_size) int32: the pattern rows, from `packed_rows`.
    key_count
        (batch or 1, num_kv_blocks) int32: valid keys.
    lines
        (2, batch, num_heads, num_kv_blocks) float32: V and S of the index rows, -1 where no row sees a line.
    gamma, tau
        0-d float64.
    config, inputs
        Floor and cap of either family, in lines; scale and soft cap.
    """
    _, batch, num_heads, blocks = lines.shape
    heads = batch * num_heads
    block_size = config.block_size
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
        blocks + 1 if config.max_blocks is None else config.max_blocks,
        config.min_blocks,
        inputs.scale,
        1.0 if inputs.softcap is None else inputs.softcap,
        HAS_SOFTCAP=inputs.softcap is not None,
        BLOCK_SIZE=block_size,
        PADDED_SIZE=triton.next_power_of_2(block_size),
        TILE=64,
        num_warps=8,
    )
    return Lines(is_query_aware, distance, kept, count)
