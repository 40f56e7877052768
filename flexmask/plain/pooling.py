"""Block means of queries and keys, and the attention scores between them (the paper's avgpool)."""

from __future__ import annotations

import torch
from torch import Tensor

from flexmask.base.blocks import BlockProblem
from flexmask.base.scores import capped, grouped_scores
from flexmask.base.visibility import in_blocks, whole_blocks


def block_means(x: Tensor, valid: Tensor | None, block_size: int) -> Tensor:
    """Mean of every block's valid tokens, zero where it has none.

    Parameters
    ----------
    x
        (batch, heads, length, head_dim), float32, float16 or bfloat16.
    valid
        (batch or 1, length) bool, or None where all tokens are. What invalid tokens hold does not matter, NaN included.
    block_size
        Tokens in a block.

    Returns
    -------
    Tensor
        (batch, heads, num_blocks, head_dim) float32.
    """
    values = x.float()
    if valid is None:
        valid = torch.ones(1, x.shape[2], dtype=torch.bool, device=x.device)
    else:
        values = torch.where(valid[:, None, :, None], values, 0.0)
    count = in_blocks(valid, block_size, False).sum(-1)
    return whole_blocks(values, 2, block_size).sum(3) / count.clamp(min=1)[:, None, :, None]


def key_means(problem: BlockProblem) -> Tensor:
    """Mean of each key block's valid keys, (batch, num_kv_heads, num_kv_blocks, head_dim) float32; 0 where it has none."""
    tokens = problem.tokens
    return block_means(problem.inputs.key, None if tokens.filled else tokens.key_valid, problem.block_size)


def pooled_scores(query_means: Tensor, key_means: Tensor, key_counts: Tensor, scale: float, softcap: float | None) -> Tensor:
    """Scores of pooled queries with pooled keys, plus the log of each key block's number of valid keys.

    The log term lets a short or padded block weigh as much as the keys it holds.

    Parameters
    ----------
    query_means
        (batch, num_heads, rows, head_dim) float32.
    key_means
        (batch, num_kv_heads, num_kv_blocks, head_dim) float32.
    key_counts
        (batch or 1, num_kv_blocks) integer: valid keys in each block; a block without any scores -inf.
    scale, softcap
        As in attention: ``softcap * tanh(scale * score / softcap)``.

    Returns
    -------
    Tensor
        (batch, num_heads, rows, num_kv_blocks) float32.
    """
    scores = capped(grouped_scores(query_means * scale, key_means), softcap)
    return scores + key_counts.float().log()[:, None, None, :]
