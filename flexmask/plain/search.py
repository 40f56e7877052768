"""FlexPrefill's selection in PyTorch, step by step (the paper's algorithm "Sparse Attention", up to the index set)."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from flexmask.base.candidate_lines import candidate_lines
from flexmask.base.inputs import AttentionInputs
from flexmask.base.representative_rows import RepresentativeRows, representative_rows
from flexmask.base.search_result import SearchResult
from flexmask.base.visibility import BlockVisibility, block_visibility, token_validity, valid_keys
from flexmask.config import FlexPrefillConfig
from flexmask.plain.block_lists import block_lists
from flexmask.plain.hybrid import search as hybrid_search
from flexmask.plain.pattern import estimated_attention, jensen_shannon_distance
from flexmask.plain.pooling import block_means
from flexmask.plain.published import published_selection
from flexmask.plain.query_aware import pooled_map, top_p_blocks
from flexmask.plain.representative import representative_attention
from flexmask.plain.vertical_slash import (
    LineMass,
    blocks_kept_always,
    extended_lines,
    kept_lines,
    line_mass,
    row_mass,
)


class Choice(NamedTuple):
    """The selection of every head, before the blocks kept always."""

    keep: Tensor  # (batch, num_heads, num_q_blocks, num_kv_blocks) bool
    is_query_aware: Tensor  # (batch, num_heads) bool
    distance: Tensor  # (batch, num_heads) float32
    num_vertical: Tensor  # (batch, num_heads) int64, or broadcasts to it
    num_slash: Tensor


def search(
    inputs: AttentionInputs, config: FlexPrefillConfig, gamma: Tensor, tau: Tensor, with_stats: bool, with_keep: bool
) -> SearchResult:
    """Choose the blocks of every head.

    Parameters
    ----------
    inputs
        A placed problem; value and sinks are not looked at.
    config
        The options, as `flexmask.config.compile_time` gives them.
    gamma, tau
        (num_heads,) and 0-d on query's device, of `flexmask._torch.widest_float`.
    with_stats, with_keep
        Whether statistics are wanted; the map of kept blocks is there anyway.
    """
    if config.selection == "hybrid":
        return hybrid_search(inputs, config, gamma, tau, with_stats, with_keep)
    block_size, lengths = config.block_size, (inputs.query.shape[2], inputs.key.shape[2])
    # blocks are chosen by `tokens`; `seen` has those that do not decide as well
    tokens = token_validity(*lengths, inputs.offset, inputs.deciding_tokens(), inputs.key)
    decided = seen = block_visibility(tokens, block_size, inputs.window)
    if inputs.deciding is not None:
        seen = block_visibility(token_validity(*lengths, inputs.offset, None, inputs.key), block_size, inputs.window)

    # step 1: attention of the representative rows, and its mass by key block (V) and by block diagonal (S)
    rows = representative_rows(config.index_queries, tokens, block_size)
    attention = representative_attention(inputs, rows, tokens)
    mass = line_mass(row_mass(attention, rows, block_size), rows, block_size)
    pattern_rows, pattern_vertical = rows, mass.vertical
    if config.pattern_queries != config.index_queries:
        pattern_rows = representative_rows(config.pattern_queries, tokens, block_size)
        pattern_attention = representative_attention(inputs, pattern_rows, tokens)
        pattern_vertical = line_mass(row_mass(pattern_attention, pattern_rows, block_size), pattern_rows, block_size).vertical

    # step 2: does attention follow block means?
    key_means = block_means(inputs.key, None if tokens.filled else tokens.key_valid, block_size)
    key_counts = valid_keys(tokens, block_size)
    if config.selection == "reference":
        key_counts = torch.ones_like(key_counts)
    estimated = estimated_attention(inputs, pattern_rows, key_means, key_counts, tokens, block_size)
    if config.selection == "reference":
        blocks = pooled_map(inputs, key_means, key_counts, tokens, seen, block_size)
        chosen = published_selection(attention, estimated, blocks, gamma, tau, config)
        keep = extended_lines(chosen.vertical, chosen.slash, seen) | chosen.query_aware
        choice = Choice(keep, chosen.is_query_aware, chosen.distance, chosen.num_vertical, chosen.num_slash)
    else:
        distance = jensen_shannon_distance(estimated, pattern_vertical)
        has_rows = tokens.row_valid.any(-1, keepdim=True)
        is_query_aware = (distance.to(tau.dtype) < tau) & has_rows

        # step 3a, and the floor for both kinds of head: verticals and slashes
        candidates = candidate_lines(tokens, block_size, inputs.window)
        vertical, slash, count = kept_lines(mass, candidates, is_query_aware, gamma, config)
        keep = extended_lines(vertical, slash, seen)
        # step 3b: blocks of the pooled map
        if config.tau > 0:
            values = pooled_map(inputs, key_means, key_counts, tokens, decided, block_size)
            keep = keep | (top_p_blocks(values, decided.visible[:, None], gamma, config) & is_query_aware[..., None, None])
        choice = Choice(keep, is_query_aware, distance, *count.unbind(0))

    # step 4: blocks kept always; step 5: lists
    keep = (choice.keep | blocks_kept_always(seen)[:, None]) & seen.visible[:, None]
    stats = _statistics(keep, choice, mass, rows, seen, block_size) if with_stats else None
    return SearchResult(block_lists(keep, seen.full), keep, stats)


def _statistics(
    keep: Tensor, choice: Choice, mass: LineMass, rows: RepresentativeRows, seen: BlockVisibility, block_size: int
) -> tuple[Tensor, ...]:
    """The tensors of FlexPrefillStats but is_dense, in its order."""
    visible_blocks = seen.visible.sum((-2, -1)).clamp(min=1)[:, None]
    q_block = (rows.row // block_size)[:, None, :, None].expand(*keep.shape[:2], -1, keep.shape[3])
    held = torch.where(keep.gather(2, q_block), mass.by_row, 0.0).sum((-2, -1))
    return (
        choice.is_query_aware,
        choice.distance,
        keep.sum((-2, -1)).float() / visible_blocks,
        choice.num_vertical.expand(keep.shape[:2]).clone(),
        choice.num_slash.expand(keep.shape[:2]).clone(),
        held / rows.taken.sum(-1).clamp(min=1)[:, None],
        torch.full_like(held, float("nan")),
    )
