"""FlexPrefill as the paper defines it.

Source: arXiv 2502.20766, section 3, algorithms "Sparse Attention", "Sparse Pattern Search", "Vertical Slash Index Search" and
"Query Aware Index Search".
"""

import math
from typing import Any

from tests.oracle import steps
from tests.oracle.margins import COARSE, pattern_margin, top_p_margin
from tests.oracle.result import ReferenceResult, head_mask
from tests.oracle.steps import AttentionHead, Budget
from tests.oracle.visibility import Visibility


def flexprefill_selection(
    head: AttentionHead, seen: Visibility, *, gamma: float, tau: float, min_budget: int, max_budget: int | None = None,
    query_aware: str = "flatten", pattern_queries: str = "last", index_queries: str = "last",
) -> ReferenceResult:  # fmt: skip
    """Decide one head: the algorithm "Sparse Attention", up to the attention itself, with the differences of `FlexPrefill`."""
    min_blocks = math.ceil(min_budget / seen.block_size)
    max_blocks = None if max_budget is None else math.ceil(max_budget / seen.block_size)
    # Sparse Pattern Search
    pattern_rows = steps.representative_rows(pattern_queries, seen)
    keys = steps.block_means(head.key, seen)
    estimated = steps.estimated_attention(head, pattern_rows, keys, seen)
    true = steps.vertical_mass(steps.representative_attention(head, pattern_rows, seen), seen)
    js_distance = steps.jensen_shannon_distance(estimated, true)
    is_query_aware = js_distance < tau
    margins = [pattern_margin(js_distance, tau)]

    # Vertical Slash Index Search; a query-aware head takes the floor only
    index_rows = steps.representative_rows(index_queries, seen)
    attention = steps.representative_attention(head, index_rows, seen)
    mass = steps.line_mass(attention, index_rows, seen)
    budget = Budget(gamma=1.0, cap=min_blocks) if is_query_aware else Budget(gamma, floor=min_blocks, cap=max_blocks)
    vertical, slash = steps.line_candidates(mass, seen)
    key_blocks, diagonals = steps.top_p(vertical, budget), steps.top_p(slash, budget)
    kept = steps.blocks_on_lines(key_blocks, diagonals, seen)
    # lines decide nothing where the map keeps every block
    if not (is_query_aware and gamma == 1 and max_blocks is None):
        margins += [top_p_margin(vertical, budget), top_p_margin(slash, budget, COARSE)]

    # Query Aware Index Search: top-p, then the heaviest of each query block
    if is_query_aware:
        groups = steps.map_candidates(steps.pooled_map(head, keys, seen), seen, query_aware)
        rows, capped = steps.top_p_rows(groups, gamma, seen.num_q_blocks), Budget(gamma=1.0, cap=max_blocks)
        kept |= {block for row in rows for block in steps.top_p(row, capped)}
        margins += [top_p_margin(group, Budget(gamma)) for group in groups] + [top_p_margin(row, capped) for row in rows]

    kept |= steps.blocks_kept_always(seen)
    numbers: dict[str, Any] = {"num_vertical_blocks": len(key_blocks), "num_slash_blocks": len(diagonals)}
    decided: dict[str, Any] = {"is_query_aware": is_query_aware, "js_distance": js_distance, **mass._asdict()}
    return head_mask(kept, attention, index_rows, seen)._replace(margin=min(margins), **decided, **numbers)
