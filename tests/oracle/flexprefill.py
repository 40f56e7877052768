"""FlexPrefill as the paper defines it.

Source: arXiv 2502.20766, section 3, algorithms "Sparse Attention", "Sparse Pattern Search", "Vertical Slash Index Search" and
"Query Aware Index Search".
"""

from typing import Any

from tests.oracle.margins import head_margins, line_margins, map_margin, pattern_margin
from tests.oracle.result import ReferenceResult, head_mask
from tests.oracle.steps import (
    AttentionHead,
    Options,
    block_means,
    blocks_kept_always,
    estimated_attention,
    extended_lines,
    jensen_shannon_distance,
    kept_lines,
    line_mass,
    pooled_map,
    representative_attention,
    representative_rows,
    top_p_blocks,
    vertical_mass,
)
from tests.oracle.visibility import Visibility


def flexprefill_selection(
    head: AttentionHead,
    seen: Visibility,
    *,
    gamma: float,
    tau: float,
    min_budget: int,
    max_budget: int | None = None,
    query_aware: str = "flatten",
    pattern_queries: str = "last",
    index_queries: str = "last",
) -> ReferenceResult:
    """Decide one head: the algorithm "Sparse Attention", up to the attention itself.

    Differs from the paper: vertical and slash lines are chosen by block, each slash split over the two block diagonals it
    crosses; the pooled estimate weighs a block by its number of valid keys; padding, windows and chunks are defined.
    """
    options = Options.of_tokens(gamma, min_budget, max_budget, seen.block_size, query_aware)
    # Sparse Pattern Search
    pattern_rows = representative_rows(pattern_queries, seen)
    keys = block_means(head.key, seen)
    estimated = estimated_attention(head, pattern_rows, keys, seen)
    true = vertical_mass(representative_attention(head, pattern_rows, seen), seen)
    js_distance = jensen_shannon_distance(estimated, true)
    is_query_aware = js_distance < tau

    # Vertical Slash Index Search; a query-aware head takes the floor only
    index_rows = representative_rows(index_queries, seen)
    attention = representative_attention(head, index_rows, seen)
    mass = line_mass(attention, index_rows, seen)
    key_blocks, diagonals = kept_lines(mass, is_query_aware, seen, options)
    kept = extended_lines(key_blocks, diagonals, seen)

    # Query Aware Index Search
    pooled = pooled_map(head, keys, seen)
    if is_query_aware:
        kept |= top_p_blocks(pooled, seen, options)

    kept |= blocks_kept_always(seen)
    margins = head_margins(
        pattern_margin(js_distance, tau),
        line_margins(mass, is_query_aware, seen, options),
        map_margin(pooled, seen, options),
        is_query_aware,
    )
    numbers = {"num_vertical_blocks": len(key_blocks), "num_slash_blocks": len(diagonals)}
    decided: dict[str, Any] = {
        "is_query_aware": is_query_aware,
        "js_distance": js_distance,
        **mass._asdict(),
        "pooled": pooled,
        **numbers,
    }
    return head_mask(kept, attention, index_rows, seen)._replace(**decided, **margins)
