"""The query-aware index: top-p over the pooled attention map (the paper's "Query Aware Index Search")."""

from __future__ import annotations

import torch
from torch import Tensor

from flexmask.base.blocks import BlockProblem
from flexmask.base.inputs import AttentionInputs
from flexmask.base.scores import masked_softmax
from flexmask.base.visibility import BlockVisibility, Tokens, valid_keys
from flexmask.plain.block_lists import Blocks
from flexmask.plain.pooling import block_means, pooled_scores
from flexmask.plain.top_p import ranks, top_p


def pooled_map(
    inputs: AttentionInputs, key_means: Tensor, key_counts: Tensor, tokens: Tokens, seen: BlockVisibility, block_size: int
) -> Tensor:
    """Attention of each query block's mean to the key blocks it sees, shaped as the map of blocks."""
    query_means = block_means(inputs.query, tokens.row_valid if tokens.padded else None, block_size)
    scores = pooled_scores(query_means, key_means, key_counts, inputs.scale, inputs.softcap)
    return torch.where(seen.visible[:, None], masked_softmax(scores, seen.visible[:, None]), 0.0)


def top_p_blocks(values: Tensor, visible: Tensor, gamma: Tensor, rule: str, max_blocks: int | None) -> Tensor:
    """The fewest blocks that hold gamma of a head's map, or by the rule "per_query" of each row, capped per row; bool."""
    if rule == "per_query":
        kept = top_p(values, visible, gamma.unsqueeze(-1))
    else:
        kept = top_p(values.flatten(2), visible.flatten(2), gamma).unflatten(2, values.shape[2:])
    if max_blocks is not None:
        kept = kept & (ranks(values, kept) < max_blocks)
    return kept


def query_aware_blocks(
    problem: BlockProblem, key_means: Tensor, is_query_aware: Tensor, gamma: Tensor, rule: str, max_blocks: int | None
) -> Blocks:
    """Step 3b: the blocks that query-aware heads keep of their pooled map."""
    tokens, size, seen = problem.tokens, problem.block_size, problem.seen
    values = pooled_map(problem.inputs, key_means, valid_keys(tokens, size), tokens, seen, size)
    kept = top_p_blocks(values, seen.visible[:, None], gamma, rule, max_blocks)
    return Blocks(kept & is_query_aware[..., None, None])
