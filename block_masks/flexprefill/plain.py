"""The steps of FlexPrefill in PyTorch: the pattern of each head, its lines, and the blocks of query-aware heads."""

from __future__ import annotations

import torch
from torch import Tensor

from flexmask.base.blocks import BlockProblem, FloatOption
from flexmask.base.scores import masked_softmax, ranks, top_p, top_p_count
from flexmask.base.selection import ChosenBlocks
from flexmask.base.visibility import blocks_seen_by_rows, candidate_lines
from flexmask.plain import LineMass, RepresentativeMass, RepresentativeRows, pooled_map, pooled_scores, take_rows


def estimated_attention(problem: BlockProblem, rows: RepresentativeRows, key_means: Tensor, key_counts: Tensor) -> Tensor:
    """Attention of the mean representative row to key means (the paper's a-bar), (batch, num_heads, num_kv_blocks)."""
    inputs = problem.inputs
    number = rows.valid.sum(-1).clamp(min=1)[:, None, None, None]
    query_mean = take_rows(inputs.query, rows).float().sum(2, keepdim=True) / number
    sees = blocks_seen_by_rows(rows.position, problem.tokens, problem.block_size, inputs.window)
    sees = (sees & rows.valid.unsqueeze(-1)).any(-2)[:, None]
    scores = pooled_scores(query_mean, key_means, key_counts, inputs.scale, inputs.softcap)
    return torch.where(sees, masked_softmax(scores.squeeze(2), sees), 0.0)


def jensen_shannon_distance(estimated: Tensor, true: Tensor) -> Tensor:
    """Square root of the Jensen-Shannon divergence over the last dimension (the paper's D_JS), in [0, sqrt(ln 2)]."""
    middle = (estimated + true) / 2
    divergence = (_relative_entropy(estimated, middle) + _relative_entropy(true, middle)) / 2
    return divergence.clamp(min=0).sqrt()


def _relative_entropy(p: Tensor, q: Tensor) -> Tensor:
    return torch.where(p == 0, 0.0, p * (p / torch.where(p == 0, 1.0, q)).log()).sum(-1)


def pattern_and_lines(
    problem: BlockProblem, pattern: RepresentativeMass, index: RepresentativeMass, key_means: Tensor, gamma: Tensor,
    tau: FloatOption, min_lines: int, max_lines: int | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Steps 2 and 3a: True for query-aware heads, by `pattern`; their distances; the lines kept, by `index`.

    `gamma` is (num_heads,), `tau` 0-d or the number 0. A query-aware head keeps `min_lines`.
    """
    estimated = estimated_attention(problem, pattern.rows, key_means, problem.key_counts())
    distance = jensen_shannon_distance(estimated, pattern.lines.vertical)
    is_query_aware = (distance.to(gamma.dtype) < tau) & problem.tokens.row_valid.any(-1, keepdim=True)
    candidates = candidate_lines(problem.visibility)
    return is_query_aware, distance, kept_lines(index.lines, candidates, is_query_aware, gamma, min_lines, max_lines)


def kept_lines(
    mass: LineMass, candidates: Tensor, is_query_aware: Tensor, gamma: Tensor, min_lines: int, max_lines: int | None
) -> Tensor:
    """Key blocks and block diagonals to keep: top-p of each family, at most `max_lines`, then at least `min_lines`."""
    lines, candidates = torch.stack([mass.vertical, mass.slash]), candidates.unsqueeze(2)
    least = candidates.sum(-1).clamp(max=min_lines)
    count = top_p_count(lines, candidates, gamma)
    if max_lines is not None:
        count = count.clamp(max=max_lines)
    count = torch.where(is_query_aware, least, torch.maximum(count, least))
    return ranks(lines, candidates) < count.unsqueeze(-1)


def query_aware_blocks(
    problem: BlockProblem, key_means: Tensor, is_query_aware: Tensor, gamma: Tensor, rule: str, max_blocks: int | None
) -> ChosenBlocks:
    """Step 3b: query-aware heads keep the fewest blocks with gamma of the pooled map, at most `max_blocks` per query block.

    With the rule "per_query" they hold gamma of each query block.
    """
    values, visible = pooled_map(problem, key_means, problem.key_counts()), problem.visible
    if rule == "per_query":
        kept = top_p(values, visible, gamma.unsqueeze(-1))
    else:
        kept = top_p(values.flatten(2), visible.flatten(2), gamma).unflatten(2, values.shape[2:])
    if max_blocks is not None:
        kept = kept & (ranks(values, kept) < max_blocks)
    return ChosenBlocks(kept & is_query_aware[..., None, None])
