"""FlexPrefill's selection as one pure function of tensors (the paper's algorithm "Sparse Attention", up to the index set)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from flexmask.emit import BlockLists, block_lists
from flexmask.pattern import jensen_shannon_distance
from flexmask.pooling import block_means, masked_softmax, pooled_scores
from flexmask.published import published_selection
from flexmask.representative import (
    PooledAttention,
    RepresentativeRows,
    pooled_attention,
    representative_attention,
    representative_rows,
    summed_attention,
    take_rows,
)
from flexmask.selection import heaviest_covering, ranks
from flexmask.sharing import for_every_head, group_any, group_mean
from flexmask.vertical_slash import blocks_kept_always, candidate_lines, extended_lines, line_counts
from flexmask.visibility import BlockVisibility, Tokens, block_visibility, blocks_seen_by_rows, token_validity, valid_keys


@dataclass(frozen=True)
class SearchOptions:
    """Everything about a selection that is fixed when it is compiled; gamma and tau are not, except at their ends."""

    block_size: int
    min_blocks: int
    max_blocks: int | None
    selection: str
    query_aware: str
    pattern_queries: str
    index_queries: str
    share_kv_heads: str | None  # None where no two heads share a key head
    keep_all: bool  # gamma is 1
    search_pattern: bool  # tau is not 0
    scale: float
    softcap: float | None
    window: int | None
    with_stats: bool
    with_keep: bool  # whether the map of kept blocks is wanted, not its lists alone


class SearchStats(NamedTuple):
    """The tensors of FlexPrefillStats."""

    is_query_aware: Tensor
    js_distance: Tensor
    density: Tensor
    num_vertical_blocks: Tensor
    num_slash_blocks: Tensor
    coverage: Tensor


class SearchResult(NamedTuple):
    """What a search hands on."""

    lists: BlockLists
    keep: Tensor | None  # (batch, num_heads, num_q_blocks, num_kv_blocks) bool
    stats: SearchStats | None


class _Choice(NamedTuple):
    """A selection before the blocks kept always: a bool map, the pattern, its distance and the counts of lines.

    Of every head, or of every key head where its heads share one selection.
    """

    keep: Tensor
    is_query_aware: Tensor
    distance: Tensor
    num_vertical: Tensor
    num_slash: Tensor


def search(
    query: Tensor,
    key: Tensor,
    gamma: Tensor,
    tau: Tensor,
    offset: Tensor | None,
    attention_mask: Tensor | None,
    options: SearchOptions,
) -> SearchResult:
    """Choose the blocks of every head.

    Parameters
    ----------
    query
        (batch, num_heads, q_len, head_dim).
    key
        (batch, num_kv_heads, kv_len, head_dim), the dtype and device of query.
    gamma, tau
        0-d float64 on the same device.
    offset
        Position of query row 0: integer, 0-d or (batch,), or None for bottom-right alignment.
    attention_mask
        (batch, kv_len) bool or integer, nonzero = token, or None.
    options
        What is fixed.
    """
    q_len, kv_len = query.shape[2], key.shape[2]
    tokens = token_validity(q_len, kv_len, offset, attention_mask, key)
    seen = block_visibility(tokens, options.block_size, options.window)

    def attend(rows: RepresentativeRows, queries: Tensor) -> Tensor:
        return representative_attention(queries, key, rows, tokens, options.scale, options.softcap, options.window)

    rows = representative_rows(options.index_queries, tokens, options.block_size)
    queries = take_rows(query, rows)
    attention = attend(rows, queries)
    pooled = pooled_attention(summed_attention(attention, rows, options.block_size), rows, options.block_size)
    pattern_rows, pattern_queries, true = rows, queries, pooled.vertical
    if options.pattern_queries != options.index_queries:
        pattern_rows = representative_rows(options.pattern_queries, tokens, options.block_size)
        pattern_queries = take_rows(query, pattern_rows)
        pattern_sums = summed_attention(attend(pattern_rows, pattern_queries), pattern_rows, options.block_size)
        true = pooled_attention(pattern_sums, pattern_rows, options.block_size).vertical

    taken = pattern_rows.taken.sum(-1).clamp(min=1)[:, None, None, None]
    query_mean = pattern_queries.float().sum(2, keepdim=True) / taken
    key_means = block_means(key, None if tokens.filled else tokens.key_valid, options.block_size)
    counts = valid_keys(tokens, options.block_size)
    if options.selection == "reference":
        counts = torch.ones_like(counts)
    pattern_sees = blocks_seen_by_rows(pattern_rows.position, tokens, options.block_size, options.window)
    pattern_sees = (pattern_sees & pattern_rows.taken.unsqueeze(-1)).any(-2)
    estimate_scores = pooled_scores(query_mean, key_means, counts, options.scale, options.softcap)
    estimated = masked_softmax(estimate_scores.squeeze(2), pattern_sees[:, None])
    estimated = torch.where(pattern_sees[:, None], estimated, 0.0)

    groups, averaged = query.shape[1] // key.shape[1], options.share_kv_heads == "mean"

    def pooled_map() -> Tensor:
        query_means = block_means(query, tokens.row_valid if tokens.padded else None, options.block_size)
        scores = pooled_scores(query_means, key_means, counts, options.scale, options.softcap)
        values = torch.where(seen.visible[:, None], masked_softmax(scores, seen.visible[:, None]), 0.0)
        # NaN in a head counts as 0 there, not in the mean
        return group_mean(values.nan_to_num(0.0), groups) if averaged else values

    if options.selection == "reference":
        budgets = (options.block_size, options.min_blocks, options.max_blocks)
        chosen = published_selection(attention, estimated, pooled_map(), gamma, tau, *budgets)
        choice = _Choice(
            extended_lines(chosen.vertical, chosen.slash, seen) | chosen.query_aware,
            chosen.is_query_aware,
            chosen.distance,
            chosen.num_vertical,
            chosen.num_slash,
        )
    else:
        lines = torch.stack([pooled.vertical, pooled.slash])
        if averaged:
            # V and S are linear in the attention: their means are those of the mean attention
            lines, estimated, true = group_mean(lines, groups, 2), group_mean(estimated, groups), group_mean(true, groups)
        distance = jensen_shannon_distance(estimated, true)
        has_rows = tokens.row_valid.any(-1, keepdim=True)
        is_query_aware = (distance.double() < tau) & has_rows
        choice = _covering(
            lines, pooled_map if options.search_pattern else None, is_query_aware, distance, gamma, tokens, seen, options
        )

    if averaged:
        choice = _Choice(*(for_every_head(x, groups) for x in choice))
    elif options.share_kv_heads == "union":
        joined = for_every_head(group_any(choice.keep, groups), groups)
        # neither _replace nor a slice: older torch does not trace them
        choice = _Choice(joined, choice.is_query_aware, choice.distance, choice.num_vertical, choice.num_slash)
    keep = (choice.keep | blocks_kept_always(seen)[:, None]) & seen.visible[:, None]
    stats = _statistics(keep, choice, pooled, rows, seen, options.block_size) if options.with_stats else None
    return SearchResult(block_lists(keep, seen.full), keep, stats)


def _covering(
    lines: Tensor,
    pooled_map: Callable[[], Tensor] | None,
    is_query_aware: Tensor,
    distance: Tensor,
    gamma: Tensor,
    tokens: Tokens,
    seen: BlockVisibility,
    options: SearchOptions,
) -> _Choice:
    """Select by coverage: the fewest key blocks, diagonals or pooled blocks that reach gamma, then floor and cap.

    `lines` is both families at once, V and S: (2, batch, num_heads, num_kv_blocks).
    """
    cover = None if options.keep_all else gamma
    candidates = candidate_lines(tokens, options.block_size, options.window).unsqueeze(2)
    count, floor = line_counts(lines, candidates, cover, options.min_blocks, options.max_blocks)
    count = torch.where(is_query_aware, floor, count)
    vertical, slash = (ranks(lines, candidates) < count.unsqueeze(-1)).unbind(0)
    keep = extended_lines(vertical, slash, seen)

    if pooled_map is not None:
        visible = seen.visible[:, None]
        values = pooled_map()
        if cover is None:
            chosen = visible.expand(values.shape)
        elif options.query_aware == "per_query":
            chosen = heaviest_covering(values, visible, cover)
        else:
            chosen = heaviest_covering(values.flatten(2), visible.flatten(2), cover).unflatten(2, values.shape[2:])
        if options.max_blocks is not None:
            chosen = chosen & (ranks(values, chosen) < options.max_blocks)
        keep = keep | (chosen & is_query_aware[..., None, None])
    return _Choice(keep, is_query_aware, distance, *count.unbind(0))


def _statistics(
    keep: Tensor,
    choice: _Choice,
    pooled: PooledAttention,
    rows: RepresentativeRows,
    seen: BlockVisibility,
    block_size: int,
) -> SearchStats:
    """Density and coverage of the kept blocks, with what was chosen."""
    visible_blocks = seen.visible.sum((-2, -1)).clamp(min=1)[:, None]
    q_block = (rows.row // block_size)[:, None, :, None].expand(*keep.shape[:2], -1, keep.shape[3])
    held = torch.where(keep.gather(2, q_block), pooled.by_row, 0.0).sum((-2, -1))
    return SearchStats(
        choice.is_query_aware,
        choice.distance,
        keep.sum((-2, -1)) / visible_blocks,
        choice.num_vertical.expand(keep.shape[:2]).clone(),
        choice.num_slash.expand(keep.shape[:2]).clone(),
        held / rows.taken.sum(-1).clamp(min=1)[:, None],
    )
