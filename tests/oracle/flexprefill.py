"""FlexPrefill in plain loops and float64, which the fast code is tested against.

It shares no code with the fast paths: `tests.oracle.steps` computes every quantity from its definition, and
`tests.oracle.margins` gives every decision its margin. Source: arXiv 2502.20766, section 3, algorithms "Sparse Attention",
"Sparse Pattern Search", "Vertical Slash Index Search" and "Query Aware Index Search". Inputs are assumed finite.
"""

import functools
import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from tests.oracle.hybrid import Rule, hybrid_selection
from tests.oracle.margins import head_margins, line_margins, map_margin, pattern_margin
from tests.oracle.published import published_selection
from tests.oracle.result import Decision, Head, ReferenceResult, empty_head, head_mask, no_map, stacked
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
from tests.oracle.visibility import Visibility, query_offsets, visibility

__all__ = ["ReferenceResult", "reference_flexprefill"]


def flexprefill_selection(head: AttentionHead, seen: Visibility, options: Options) -> Head:
    """Decide one head: the algorithm "Sparse Attention", up to the attention itself."""
    # Sparse Pattern Search
    pattern_rows = representative_rows(options.pattern_queries, seen)
    keys = block_means(head.key, seen)
    estimated = estimated_attention(head, pattern_rows, keys, seen)
    true = vertical_mass(representative_attention(head, pattern_rows, seen), seen)
    js_distance = jensen_shannon_distance(estimated, true)
    is_query_aware = js_distance < options.tau

    # Vertical Slash Index Search; a query-aware head takes the floor only
    index_rows = representative_rows(options.index_queries, seen)
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
        pattern_margin(js_distance, options.tau),
        line_margins(mass, is_query_aware, seen, options),
        map_margin(pooled, seen, options),
        is_query_aware,
    )
    decision = Decision(is_query_aware, js_distance, *mass, pooled, no_map(seen), math.nan, len(key_blocks), len(diagonals))
    return Head(head_mask(kept, attention, index_rows, seen), decision, margins)


def reference_flexprefill(
    query: Tensor,
    key: Tensor,
    gamma: float | Sequence[float] | Tensor = 0.95,
    tau: float = 0.1,
    *,
    block_size: int = 128,
    min_budget: int = 1024,
    max_budget: int | None = None,
    method: str = "flexprefill",
    query_aware: str = "flatten",
    pattern_queries: str = "last",
    index_queries: str = "last",
    row_stride: int = 8,
    rule: Rule | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    window: int | None = None,
    attention_mask: Tensor | None = None,
    q_offset: int | Tensor | None = None,
) -> ReferenceResult:
    """Decide the block mask of every head, in float64.

    Takes the arguments of the mask functions, all options of the three methods at once, and `rule`, the constants of hybrid
    selection. `tests.oracle.hybrid` and `tests.oracle.published` define the other two methods.

    Differs from the paper: vertical and slash lines are chosen by block, each slash split over the two block diagonals it
    crosses; the pooled estimate weighs a block by its number of valid keys; padding, windows and chunks are defined.
    Arguments are not checked.
    """
    options = Options(
        gamma=math.nan,  # each head's own, below
        tau=tau,
        min_blocks=math.ceil(min_budget / block_size),
        max_blocks=None if max_budget is None else math.ceil(max_budget / block_size),
        query_aware=query_aware,
        pattern_queries=pattern_queries,
        index_queries=index_queries,
        row_stride=row_stride,
    )
    batch, num_heads, q_len, head_dim = query.shape
    num_kv_heads, kv_len = key.shape[1:3]
    gammas = [float(gamma)] * num_heads if isinstance(gamma, (int, float)) else [float(share) for share in gamma]
    select: Callable[[AttentionHead, Visibility, Options], Head] = flexprefill_selection
    if method == "published":
        select = published_selection
    if method == "hybrid":
        assert rule is not None
        select = functools.partial(hybrid_selection, rule=rule)
    scale = 1 / math.sqrt(head_dim) if scale is None else scale

    heads = []
    for b, offset in enumerate(query_offsets(q_offset, batch, kv_len - q_len)):
        is_token = torch.ones(kv_len, dtype=torch.bool) if attention_mask is None else attention_mask[b].cpu() != 0
        seen = visibility(q_len, offset, is_token, window, block_size)
        for h in range(num_heads):
            if not seen.valid_rows:
                heads.append(empty_head(seen))
                continue
            query_head = query[b, h].detach().cpu().double()
            key_head = key[b, h // (num_heads // num_kv_heads)].detach().cpu().double()
            own = options._replace(gamma=gammas[h])
            heads.append(select(AttentionHead(query_head, key_head, scale, softcap), seen, own))
    return stacked(heads, batch)
