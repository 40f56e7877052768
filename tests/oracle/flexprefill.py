"""FlexPrefill in plain loops and float64: slow, obvious, and what the fast code is tested against.

No code is shared with the fast paths. Every quantity is computed from its definition, token by token or offset by offset
(`tests.oracle.steps`), and every decision comes with its margin (`tests.oracle.margins`).

The method is FlexPrefill, arXiv 2502.20766, section 3, algorithms "Sparse Attention", "Sparse Pattern Search", "Vertical Slash
Index Search" and "Query Aware Index Search"; `flexprefill_selection` below is all four. Inputs are assumed finite; the public
functions check shapes and ranges, this module does not.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from tests.oracle.hybrid import Rule, hybrid_selection
from tests.oracle.margins import head_margins, line_margins, map_margin, pattern_margin
from tests.oracle.published import check_published, published_selection
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
    """Decide one head: the paper's algorithm "Sparse Attention", up to the attention itself."""
    # Sparse Pattern Search: does the true attention of the representative rows follow the pooled estimate?
    pattern_rows = representative_rows(options.pattern_queries, seen)
    keys = block_means(head.key, seen)
    estimated = estimated_attention(head, pattern_rows, keys, seen)
    true = vertical_mass(representative_attention(head, pattern_rows, seen), seen)
    js_distance = jensen_shannon_distance(estimated, true)
    is_query_aware = js_distance < options.tau

    # Vertical Slash Index Search: the heaviest key blocks and block diagonals; a query-aware head takes the floor only
    index_rows = representative_rows(options.index_queries, seen)
    attention = representative_attention(head, index_rows, seen)
    mass = line_mass(attention, index_rows, seen)
    key_blocks, diagonals = kept_lines(mass, is_query_aware, seen, options)
    kept = extended_lines(key_blocks, diagonals, seen)

    # Query Aware Index Search: the heaviest blocks of the pooled map
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
    """Decide FlexPrefill's block mask slowly and plainly, in float64.

    Each head compares the true block-wise attention of its representative rows with a pooled
    estimate (Jensen-Shannon distance D). If ``D < tau`` it is Query-Aware and takes the heaviest
    blocks of the pooled map; else it is Vertical-Slash and takes the heaviest key blocks and block
    diagonals. ``gamma`` of each family's own sum is kept.

    Source: FlexPrefill, arXiv 2502.20766, section 3, its four algorithms.

    Differs from the paper: vertical and slash lines are chosen by block, each slash split over the
    two block diagonals it crosses; the pooled estimate weighs a block by its number of valid keys;
    padding, windows and chunks of a longer prompt are defined. ``method="published"`` decides
    as the published code does instead, in its own function.

    Parameters
    ----------
    query : Tensor
        ``(batch, num_heads, q_len, head_dim)``, any float dtype and device.
    key : Tensor
        ``(batch, num_kv_heads, kv_len, head_dim)``; ``num_kv_heads`` divides ``num_heads``.
    gamma : float, or a sequence or ``(num_heads,)`` tensor of them
        Share of attention to keep, in (0, 1]; 1 keeps every visible block. Default ours.
    tau : float
        Distance below which a head is Query-Aware, in [0, 1]; 0 gives none. Default: paper.
    block_size : int
        Tokens per block on both sides. Default: paper.
    min_budget : int
        Tokens: at least ``ceil(min_budget / block_size)`` key blocks and as many block diagonals
        per head. Default: paper.
    max_budget : int, optional
        Tokens: at most ``ceil(max_budget / block_size)`` of each, and of the pooled map's blocks
        in each query block.
    method : {"flexprefill", "hybrid", "published"}
        Ours, ours with the evidence of all rows (`tests.oracle.hybrid`), or the published code's.
    query_aware : {"flatten", "per_query"}
        Whether a Query-Aware head keeps ``gamma`` of the whole map or of each query block.
    pattern_queries, index_queries : {"last", "middle"}
        Representative rows for the pattern and for the vertical-slash index.
    row_stride : int
        Hybrid selection samples every row_stride-th row of a query block. Default ours.
    rule : Rule, optional
        The constants of hybrid selection, which needs them.
    scale : float, optional
        Score multiplier, ``1 / sqrt(head_dim)`` unless given.
    softcap : float, optional
        Scores become ``softcap * tanh(score / softcap)``.
    window : int, optional
        Tokens a row sees, its own position included.
    attention_mask : Tensor, optional
        ``(batch, kv_len)``, bool or integer; nonzero means a token.
    q_offset : int or Tensor, optional
        Position of query row 0, in ``[0, kv_len - q_len]``; default the upper end. An integer
        tensor is 0-d or ``(batch,)`` and is clamped. Keys at ``q_offset + q_len`` and beyond do
        not exist yet.

    Returns
    -------
    ReferenceResult
        The mask, the quantities it was decided from, statistics and margins.

    Raises
    ------
    ValueError
        If an option word is unknown, an int ``q_offset`` is out of range, or
        ``method="published"`` is asked for something the published code cannot do.

    Examples
    --------
    >>> import torch
    >>> query, key = torch.zeros(1, 1, 64, 8), torch.zeros(1, 1, 64, 8)
    >>> result = reference_flexprefill(query, key, 0.5, 0.0, block_size=16, min_budget=0)
    >>> result.keep[0, 0].int().tolist()
    [[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 1, 1]]
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
    _check_words(method, options)
    batch, num_heads, q_len, head_dim = query.shape
    num_kv_heads, kv_len = key.shape[1:3]
    if method == "published":
        check_published(
            (q_len, kv_len, block_size),
            options,
            softcap=softcap,
            window=window,
            attention_mask=attention_mask,
            q_offset=q_offset,
        )
    gammas = [float(gamma)] * num_heads if isinstance(gamma, (int, float)) else [float(share) for share in gamma]
    if len(gammas) != num_heads:
        raise ValueError(f"gamma must have one share for each of {num_heads} heads; got {len(gammas)}")
    select: Callable[[AttentionHead, Visibility, Options], Head] = flexprefill_selection
    if method == "published":
        select = published_selection
    if method == "hybrid":
        if rule is None:
            raise ValueError("hybrid selection needs a rule")
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


def _check_words(method: str, options: Options) -> None:
    """Refuse a word that an option does not have."""
    for name, value, words in (
        ("method", method, ("flexprefill", "hybrid", "published")),
        ("query_aware", options.query_aware, ("flatten", "per_query")),
        ("pattern_queries", options.pattern_queries, ("last", "middle")),
        ("index_queries", options.index_queries, ("last", "middle")),
    ):
        if value not in words:
            raise ValueError(f"{name} must be one of {words}; got {value!r}")
