"""FlexPrefill's selection by Triton kernels: the steps of `flexmask.plain.search`, under the same names.

No sort, and no intermediate larger than the map of blocks.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from flexmask.base.inputs import AttentionInputs
from flexmask.base.representative_rows import RepresentativeRows, representative_rows
from flexmask.base.search_result import BlockLists, SearchResult
from flexmask.base.visibility import Tokens, block_visibility, token_validity
from flexmask.config import FlexPrefillConfig
from flexmask.kernels.block_lists import block_lists, density
from flexmask.kernels.hybrid import search as hybrid_search
from flexmask.kernels.pattern import estimated_scores, pattern_and_lines
from flexmask.kernels.pooling import block_means
from flexmask.kernels.query_aware import pooled_map
from flexmask.kernels.query_aware_top_p import top_p_map, top_p_rows
from flexmask.kernels.representative import BlockSums, block_sums, packed_rows
from flexmask.kernels.vertical_slash import RowNorms, kept_mass, line_mass, row_norms
from flexmask.kernels.visibility import PackedEdges, packed_edges


class RepresentativeMass(NamedTuple):
    """The attention of the representative rows, summed."""

    rows: RepresentativeRows
    packed: Tensor  # the rows as kernels read them, of `packed_rows`
    sums: BlockSums
    norms: RowNorms
    lines: Tensor  # (2, batch, num_heads, num_kv_blocks) float32: V and S, -1 where no row sees a line


def search(
    inputs: AttentionInputs, config: FlexPrefillConfig, gamma: Tensor, tau: Tensor, with_stats: bool, with_keep: bool
) -> SearchResult:
    """Choose the blocks of every head, as `flexmask.plain.search.search` does, which alone knows ``selection="reference"``."""
    if config.selection == "hybrid":
        return hybrid_search(inputs, config, gamma, tau, with_stats, with_keep)
    block_size, lengths = config.block_size, (inputs.query.shape[2], inputs.key.shape[2])
    # blocks are chosen by `tokens`; `seen` has those that do not decide as well
    tokens = seen = token_validity(*lengths, inputs.offset, inputs.deciding_tokens(), inputs.key)
    edges = seen_edges = packed_edges(tokens, block_size, inputs.window)
    if inputs.deciding is not None:
        seen = token_validity(*lengths, inputs.offset, None, inputs.key)
        seen_edges = packed_edges(seen, block_size, inputs.window)
    key_means = block_means(inputs.key, None if tokens.filled else tokens.key_valid, None, block_size)

    # step 1: attention of the representative rows, and its mass by key block (V) and by block diagonal (S)
    mass = _representative_mass(config.index_queries, inputs, tokens, edges, block_size)
    pattern = mass
    if config.pattern_queries != config.index_queries:
        pattern = _representative_mass(config.pattern_queries, inputs, tokens, edges, block_size)

    # steps 2 and 3a: the pattern of each head, and its verticals and slashes
    estimate = estimated_scores(inputs, key_means, pattern.packed, edges.last_valid_key, block_size)
    decided = pattern_and_lines(
        estimate, pattern.lines[0], pattern.packed, edges.key_count, mass.lines, gamma, tau, config, inputs
    )
    # step 3b: blocks of the pooled map
    blocks = None
    if config.tau > 0:
        blocks = _pooled_blocks(inputs, key_means, tokens, edges, decided.is_query_aware, gamma, config)

    # step 4: blocks kept always; step 5: lists
    *tensors, keep = block_lists(decided, blocks, seen_edges, inputs, block_size, with_keep)
    lists = BlockLists(*tensors)
    if not with_stats:
        return SearchResult(lists, keep, None)
    assert keep is not None
    visible = block_visibility(seen, block_size, inputs.window).visible
    held = kept_mass(keep, mass.rows, mass.sums, mass.norms, block_size)
    stats = (
        decided.is_query_aware,
        decided.distance,
        density(lists, visible),
        decided.number[0].clone(),  # an operator's results must not share memory
        decided.number[1].clone(),
        held / mass.rows.taken.sum(-1).clamp(min=1)[:, None],
        torch.full_like(held, float("nan")),
    )
    return SearchResult(lists, keep, stats)


def _representative_mass(
    which: str, inputs: AttentionInputs, tokens: Tokens, edges: PackedEdges, block_size: int
) -> RepresentativeMass:
    """V and S of the "last" or "middle" rows, and the intermediates that the statistics need."""
    rows = representative_rows(which, tokens, block_size)
    packed = packed_rows(rows, tokens.offset)
    sums = block_sums(inputs, packed, tokens.key_valid if tokens.padded else None, block_size)
    norms = row_norms(sums)
    return RepresentativeMass(rows, packed, sums, norms, line_mass(sums, norms, packed, edges.candidates))


def _pooled_blocks(
    inputs: AttentionInputs,
    key_means: Tensor,
    tokens: Tokens,
    edges: PackedEdges,
    is_query_aware: Tensor,
    gamma: Tensor,
    config: FlexPrefillConfig,
) -> Tensor:
    """The blocks that query-aware heads keep of their pooled map, int8; other heads stay unwritten.

    Seven arguments: two kernels, with what the steps before them have computed.
    """
    block_size = config.block_size
    query_means = block_means(inputs.query, tokens.row_valid if tokens.padded else None, is_query_aware, block_size)
    values = pooled_map(query_means, key_means, is_query_aware, edges, inputs, block_size)
    if config.query_aware == "per_query":
        return top_p_rows(values, is_query_aware, edges, gamma, config.max_blocks, block_size)
    blocks = top_p_map(values, is_query_aware, edges, gamma, block_size)
    if config.max_blocks is None:
        return blocks
    within = torch.where(blocks != 0, values, -1.0)
    return top_p_rows(within, is_query_aware, edges, torch.ones_like(gamma), config.max_blocks, block_size)
