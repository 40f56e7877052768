"""`flexmask.search` for CUDA: the same choices by Triton kernels, without sorts and without maps of more than the blocks."""

from __future__ import annotations

import torch
from torch import Tensor

from flexmask._torch import computed_once
from flexmask.emit import BlockLists
from flexmask.representative import RepresentativeRows, representative_rows
from flexmask.search import SearchOptions, SearchResult, SearchStats
from flexmask.sharing import for_every_head, group_any, group_mean
from flexmask.triton_block_sums import BlockSums, block_sums, packed_rows
from flexmask.triton_covering import covering_blocks, covering_rows
from flexmask.triton_estimate import estimated_scores
from flexmask.triton_line_attention import RowNorms, line_attention, row_norms
from flexmask.triton_lists import line_lists
from flexmask.triton_means import wanted_block_means
from flexmask.triton_pattern import Lines, pattern_and_lines
from flexmask.triton_pooled_map import pooled_map
from flexmask.triton_visibility import PackedEdges, packed_edges
from flexmask.visibility import Tokens, block_visibility, token_validity


def fused_search(
    query: Tensor,
    key: Tensor,
    gamma: Tensor,
    tau: Tensor,
    offset: Tensor | None,
    attention_mask: Tensor | None,
    options: SearchOptions,
) -> SearchResult:
    """Choose the blocks of every head, as `flexmask.search.search` does; ``selection="coverage"`` only."""
    block_size, kv_len = options.block_size, key.shape[2]
    groups = query.shape[1] // key.shape[1]
    tokens = token_validity(query.shape[2], kv_len, offset, attention_mask, key)
    edges = packed_edges(tokens, block_size, options.window)

    key_means = wanted_block_means(key, None if tokens.filled else tokens.key_valid, None, block_size)

    rows, packed, sums, norms, lines = _attend(options.index_queries, query, key, tokens, edges, options)
    pattern_rows, attended = packed, lines[0]
    if options.pattern_queries != options.index_queries:
        _, pattern_rows, _, _, pattern_lines = _attend(options.pattern_queries, query, key, tokens, edges, options)
        attended = pattern_lines[0]
    if options.share_kv_heads == "mean":
        # a line that no row sees is negative in every head, hence in their mean
        lines, attended = group_mean(lines, groups, 2), group_mean(attended, groups)
    estimate = estimated_scores(query, key_means, pattern_rows, edges.keys[0], kv_len, block_size, options.window)
    decided = (gamma, tau, options.min_blocks, options.max_blocks, options.scale, options.softcap)
    chosen_lines = pattern_and_lines(estimate, attended, pattern_rows, edges.keys[2], lines, *decided)

    blocks = None
    if options.search_pattern:
        blocks = _pooled_blocks(query, key_means, tokens, edges, chosen_lines.is_query_aware, gamma, options)
    kept, is_query_aware = chosen_lines.kept, chosen_lines.is_query_aware
    if options.share_kv_heads == "union":
        kept, is_query_aware, blocks = _union(kept, is_query_aware, blocks, groups)
    copies = 1 if options.share_kv_heads is None else groups
    *lists, keep = line_lists(kept, is_query_aware, blocks, edges, kv_len, block_size, options.window, options.with_keep, copies)
    stats = _statistics(keep, chosen_lines, rows, sums, norms, tokens, options) if options.with_stats else None
    return SearchResult(BlockLists(*lists), keep, stats)


def _attend(
    which: str, query: Tensor, key: Tensor, tokens: Tokens, edges: PackedEdges, options: SearchOptions
) -> tuple[RepresentativeRows, Tensor, BlockSums, RowNorms, Tensor]:
    """The "last" or "middle" rows, as kernels read them too, their attention's sums and softmax, and V and S of it."""
    rows = representative_rows(which, tokens, options.block_size)
    key_valid = tokens.key_valid if tokens.padded else None
    scores = (options.block_size, options.scale, options.softcap, options.window)
    packed = packed_rows(rows, tokens.offset)
    sums = block_sums(query, key, packed, key_valid, *scores)
    norms = row_norms(sums)
    return rows, packed, sums, norms, line_attention(sums, norms, packed, edges.keys[3:])


def _union(kept: Tensor, is_query_aware: Tensor, blocks: Tensor | None, groups: int) -> tuple[Tensor, Tensor, Tensor | None]:
    """What the heads of a group keep together: lines, whether blocks too, and blocks.

    Lines may be joined before they are extended over the map. Blocks are unwritten in heads that are not query-aware.
    """
    if blocks is not None:
        blocks = group_any((blocks != 0) & is_query_aware[..., None, None], groups).to(torch.int8)
    return group_any(kept != 0, groups, 2).to(torch.int8), group_any(is_query_aware, groups), blocks


def _pooled_blocks(
    query: Tensor,
    key_means: Tensor,
    tokens: Tokens,
    edges: PackedEdges,
    is_query_aware: Tensor,
    gamma: Tensor,
    options: SearchOptions,
) -> Tensor:
    """What query-aware heads keep of their pooled map, or groups of the mean of theirs."""
    kv_len = tokens.key_valid.shape[1]
    groups = query.shape[1] // is_query_aware.shape[1]
    wanted = is_query_aware if groups == 1 else for_every_head(is_query_aware, groups)
    query_means = wanted_block_means(query, tokens.row_valid if tokens.padded else None, wanted, options.block_size)
    scores = (options.scale, options.softcap, options.window)
    values = pooled_map(query_means, key_means, wanted, edges, kv_len, options.block_size, *scores)
    if groups > 1:
        # what is unwritten stays unread: it is in the same places of every head of a group
        values = computed_once(group_mean(values, groups))
    if options.query_aware == "per_query" or options.keep_all:
        return covering_rows(values, is_query_aware, edges, gamma, options.max_blocks, options.block_size)
    blocks = covering_blocks(values, is_query_aware, edges, gamma, options.block_size)
    if options.max_blocks is None:
        return blocks
    within = torch.where(blocks != 0, values, -1.0)
    return covering_rows(within, is_query_aware, edges, torch.ones_like(gamma), options.max_blocks, options.block_size)


def _statistics(
    keep: Tensor | None,
    lines: Lines,
    rows: RepresentativeRows,
    sums: BlockSums,
    norms: RowNorms,
    tokens: Tokens,
    options: SearchOptions,
) -> SearchStats:
    """Density and coverage of the kept blocks, with what was chosen."""
    assert keep is not None
    visible = block_visibility(tokens, options.block_size, options.window).visible
    q_block = (rows.row // options.block_size)[:, None, :, None].expand(*keep.shape[:2], -1, keep.shape[3])
    by_row = torch.exp2(sums.blocks[..., 0] - norms.base.unsqueeze(-2)) * sums.blocks[..., 1] * norms.factor.unsqueeze(-2)
    held = torch.where(keep.gather(2, q_block), by_row.mT, 0.0).sum((-2, -1))
    is_query_aware, distance, number = lines.is_query_aware, lines.distance, lines.number
    groups = keep.shape[1] // distance.shape[1]
    if groups > 1:
        is_query_aware, distance = for_every_head(is_query_aware, groups), for_every_head(distance, groups)
        number = for_every_head(number, groups, 2)
    return SearchStats(
        is_query_aware,
        distance,
        keep.sum((-2, -1)) / visible.sum((-2, -1)).clamp(min=1)[:, None],
        number[0].clone(),  # an operator's results must not share memory
        number[1].clone(),
        held / rows.taken.sum(-1).clamp(min=1)[:, None],
    )
