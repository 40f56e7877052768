"""FlexPrefill as the paper defines it.

Source: arXiv 2502.20766, section 3, algorithms "Sparse Attention", "Sparse Pattern Search", "Vertical Slash Index Search" and
"Query Aware Index Search".
"""

from typing import Any

from tests.oracle import steps
from tests.oracle.margins import line_margin, map_margin, pattern_margin
from tests.oracle.result import ReferenceResult, head_mask
from tests.oracle.steps import AttentionHead, Options
from tests.oracle.visibility import Visibility


def flexprefill_selection(
    head: AttentionHead, seen: Visibility, *, gamma: float, tau: float, min_budget: int, max_budget: int | None = None,
    query_aware: str = "flatten", pattern_queries: str = "last", index_queries: str = "last",
) -> ReferenceResult:  # fmt: skip
    """Decide one head: the algorithm "Sparse Attention", up to the attention itself.

    Differs from the paper: vertical and slash lines are chosen by block, each slash split over the two block diagonals it
    crosses; the pooled estimate weighs a block by its number of valid keys; padding, windows and chunks are defined.
    """
    options = Options.of_tokens(gamma, min_budget, max_budget, seen.block_size, query_aware)
    # Sparse Pattern Search
    pattern_rows = steps.representative_rows(pattern_queries, seen)
    keys = steps.block_means(head.key, seen)
    estimated = steps.estimated_attention(head, pattern_rows, keys, seen)
    true = steps.vertical_mass(steps.representative_attention(head, pattern_rows, seen), seen)
    js_distance = steps.jensen_shannon_distance(estimated, true)
    is_query_aware = js_distance < tau

    # Vertical Slash Index Search; a query-aware head takes the floor only
    index_rows = steps.representative_rows(index_queries, seen)
    attention = steps.representative_attention(head, index_rows, seen)
    mass = steps.line_mass(attention, index_rows, seen)
    key_blocks, diagonals = steps.kept_lines(mass, is_query_aware, seen, options)
    kept = steps.blocks_on_lines(key_blocks, diagonals, seen)

    # Query Aware Index Search
    pooled = steps.pooled_map(head, keys, seen)
    if is_query_aware:
        kept |= steps.top_p_blocks(pooled, seen, options)

    kept |= steps.blocks_kept_always(seen)
    margin = min(pattern_margin(js_distance, tau), line_margin(mass, is_query_aware, seen, options))
    if is_query_aware:
        margin = min(margin, map_margin(pooled, seen, options))
    numbers: dict[str, Any] = {"num_vertical_blocks": len(key_blocks), "num_slash_blocks": len(diagonals)}
    decided: dict[str, Any] = {"is_query_aware": is_query_aware, "js_distance": js_distance, **mass._asdict()}
    return head_mask(kept, attention, index_rows, seen)._replace(margin=margin, **decided, **numbers)
