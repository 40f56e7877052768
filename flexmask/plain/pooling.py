"""Block means, and the attention between them (the paper's avgpool)."""

from __future__ import annotations

import torch
from torch import Tensor

from flexmask.base.blocks import BlockProblem
from flexmask.base.scores import capped, grouped_scores, masked_softmax
from flexmask.base.visibility import in_blocks, whole_blocks


def block_means(x: Tensor, valid: Tensor | None, block_size: int) -> Tensor:
    """Mean of every block's valid tokens (None: all), (batch, heads, num_blocks, head_dim) float32; zero without any.

    `x` is (batch, heads, length, head_dim), `valid` (batch or 1, length) bool; what invalid tokens hold does not matter.
    """
    values = x.float()
    if valid is None:
        valid = torch.ones(1, x.shape[2], dtype=torch.bool, device=x.device)
    else:
        values = torch.where(valid[:, None, :, None], values, 0.0)
    count = in_blocks(valid, block_size, False).sum(-1)
    return whole_blocks(values, 2, block_size).sum(3) / count.clamp(min=1)[:, None, :, None]


def key_means(problem: BlockProblem) -> Tensor:
    """Mean of each key block's valid keys, (batch, num_kv_heads, num_kv_blocks, head_dim) float32."""
    tokens = problem.tokens
    return block_means(problem.inputs.key, None if tokens.filled else tokens.key_valid, problem.block_size)


def pooled_scores(query_means: Tensor, key_means: Tensor, key_counts: Tensor, scale: float, softcap: float | None) -> Tensor:
    """Scores of pooled queries with pooled keys, (batch, num_heads, rows, num_kv_blocks), -inf for blocks without valid keys."""
    # the logarithm lets a short or padded block weigh as much as its keys
    scores = capped(grouped_scores(query_means * scale, key_means), softcap)
    return scores + key_counts.float().log()[:, None, None, :]


def pooled_map(problem: BlockProblem, key_means: Tensor, key_counts: Tensor) -> Tensor:
    """Attention of each query block's mean to the key blocks it sees, shaped as the map of blocks."""
    inputs = problem.inputs
    scores = pooled_scores(problem.query_means(), key_means, key_counts, inputs.scale, inputs.softcap)
    return torch.where(problem.visible, masked_softmax(scores, problem.visible), 0.0)
