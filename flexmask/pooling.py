"""Block means of queries and keys, and the attention scores between them (the paper's avgpool)."""

from __future__ import annotations

import torch
from torch import Tensor

from flexmask.visibility import in_blocks, whole_blocks


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


def grouped_scores(query: Tensor, key: Tensor) -> Tensor:
    """``query @ key^T`` in float32 where groups of query heads share a key head.

    (batch, num_heads, rows, head_dim) and (batch, num_kv_heads, columns, head_dim) give (batch, num_heads, rows, columns).
    """
    batch, num_heads, rows, head_dim = query.shape
    num_kv_heads = key.shape[1]
    groups = num_heads // num_kv_heads
    query = query.reshape(batch * num_kv_heads, groups * rows, head_dim)
    scores = query.float() @ key.flatten(0, 1).transpose(1, 2).float()
    return scores.reshape(batch, num_heads, rows, key.shape[2])


def capped(scores: Tensor, softcap: float | None) -> Tensor:
    """Soft-capped scores, ``softcap * tanh(scores / softcap)``; unchanged where softcap is None."""
    return scores if softcap is None else softcap * torch.tanh(scores / softcap)


def masked_softmax(scores: Tensor, visible: Tensor) -> Tensor:
    """Softmax over the visible entries of the last dimension, 0 elsewhere; a row that sees nothing comes out even, not 0.

    It writes over `scores`: on CPUs new memory would take longer than the arithmetic.
    """
    scores.masked_fill_(~visible, torch.finfo(scores.dtype).min)
    if scores.device.type != "cpu" or torch.compiler.is_compiling():
        return scores.softmax(-1)
    return torch.softmax(scores, -1, out=scores)
