"""The block sets of the authors' published code, ``method="published"``.

Source: github.com/bytedance/FlexPrefill. The docstring of `flexmask.block_masks.published_mask` lists what it does otherwise. Key
block 0 and diagonal 0 have infinite weight, and take a place each in the counts.
"""

import math
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tests.oracle import steps
from tests.oracle.margins import gap, pattern_margin, relative, top_p_margin
from tests.oracle.result import ReferenceResult, head_mask
from tests.oracle.steps import AttentionHead, Budget
from tests.oracle.visibility import Block, Visibility


def published_selection(
    head: AttentionHead, seen: Visibility, *, gamma: float, tau: float, min_budget: int, max_budget: int | None = None
) -> ReferenceResult:
    """Decide one head as the published code does."""
    most = seen.num_kv_blocks if max_budget is None else min(seen.num_kv_blocks, math.ceil(max_budget / seen.block_size))
    bounds = math.ceil(min_budget / seen.block_size), most
    rows = steps.representative_rows("last", seen)
    attention = steps.representative_attention(head, rows, seen)
    by_token, by_offset = attention.mean(dim=0), steps.mass_by_offset(attention, rows, seen.offset)
    vertical, slash = steps.by_block(by_token, seen.block_size), steps.by_block(by_offset, seen.block_size)

    keys = steps.block_means(head.key, seen)
    keys = keys._replace(log_counts=torch.zeros_like(keys.log_counts))
    estimated = steps.estimated_attention(head, rows, keys, seen)
    js_distance = distance_with_nan(estimated, vertical)
    is_query_aware = js_distance < tau

    pooled = steps.pooled_map(head, keys, seen)
    (map_values,) = steps.map_candidates(pooled, seen, "flatten")
    blocks, in_map = blocks_within(map_values, gamma, seen.num_kv_blocks)

    key_blocks = published_lines(by_token, vertical, is_query_aware, gamma, bounds)
    diagonals = published_lines(by_offset, slash, is_query_aware, gamma, bounds)
    kept = steps.blocks_on_lines(key_blocks.lines, diagonals.lines, seen)
    if is_query_aware:
        kept |= set(blocks)

    pattern = pattern_margin(js_distance, tau)
    if tau > 0 and may_underflow(estimated, vertical):
        pattern = 0.0
    margin = min(pattern, key_blocks.margin, diagonals.margin, in_map if is_query_aware else math.inf)
    numbers: dict[str, Any] = {"num_vertical_blocks": key_blocks.num_lines, "num_slash_blocks": diagonals.num_lines}
    decided: dict[str, Any] = {"is_query_aware": is_query_aware, "js_distance": js_distance, "vertical": vertical, "slash": slash}
    return head_mask(kept, attention, rows, seen)._replace(margin=margin, **decided, **numbers)


def distance_with_nan(estimated: Tensor, true: Tensor) -> float:
    """D_JS with 0 * log 0 taken in float32: a share that underflows there gives NaN."""
    if (torch.cat([estimated, true]).float() == 0).any():
        return math.nan
    return steps.jensen_shannon_distance(estimated, true)


def may_underflow(estimated: Tensor, true: Tensor) -> bool:
    """True if float32 may or may not reach NaN: near its smallest number that depends on the order of a sum."""
    shares = torch.cat([estimated, true])
    return bool(((shares > 2.0**-160) & (shares < 2.0**-116)).any())


def block_count(by_unit: Tensor, gamma: float, smallest: int, largest: int) -> tuple[int, float]:
    """(running sums <= gamma) + 1 tokens, and that // 128 + 1 blocks; the margin is infinite where the clamp decides."""

    def clamped(count: int) -> int:
        return min(max(count, smallest), largest)

    running: list[float] = by_unit.sort(descending=True).values.cumsum(dim=0).tolist()
    if gamma == 1:
        return clamped((len(running) + 1) // 128 + 1), math.inf
    tokens = 1 + sum(total <= gamma for total in running)
    whole = tokens // 128
    count = clamped(whole + 1)
    margins = [math.inf]
    # The count stands while 128 * whole <= tokens < 128 * (whole + 1).
    least, most = 128 * whole - 1, 128 * whole + 127
    if whole > 0 and clamped(whole) != count:
        margins.append(relative(running[least - 1], gamma))
    if most <= len(running) and clamped(whole + 2) != count:
        margins.append(relative(running[most - 1], gamma))
    return count, min(margins)


class Lines(NamedTuple):
    """Selected key blocks or block diagonals of one head."""

    lines: list[int]
    num_lines: int  # 0 for a query-aware head without a floor, though line 0 is kept
    margin: float


def published_lines(by_unit: Tensor, by_line: Tensor, is_query_aware: bool, gamma: float, bounds: tuple[int, int]) -> Lines:
    """Select lines from the mass of tokens (or offsets) and of blocks, of a number within bounds."""
    count, margin = (min(bounds), math.inf) if is_query_aware else block_count(by_unit, gamma, *bounds)
    # line 0 is kept even at a count of 0: the published code fills the places left over with block 0
    values = dict(enumerate([math.inf, *by_line.tolist()[1:]]))
    budget = Budget(gamma=1.0, cap=max(1, count))
    return Lines(steps.top_p(values, budget), count, min(margin, top_p_margin(values, budget)))


def blocks_within(values: dict[Block, float], gamma: float, num_kv_blocks: int) -> tuple[list[Block], float]:
    """The heaviest blocks of the flattened map whose running sum stays <= gamma * N, and the margin.

    The block that crosses is left out.
    """
    order, threshold = steps.heaviest_first(values), gamma * num_kv_blocks
    if gamma == 1:
        return order, math.inf
    running = list(accumulate(values[block] for block in order))
    kept = next((place for place, total in enumerate(running) if total > threshold), len(order))
    margin = min((relative(total, threshold) for total in running[: kept + 1]), default=math.inf)
    if 0 < kept < len(order):
        margin = min(margin, gap(values[order[kept - 1]], values[order[kept]]))
    return order[:kept], margin
