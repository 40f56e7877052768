"""Attention scores: grouped heads, soft cap, softmax over visible entries."""

from __future__ import annotations

import torch
from torch import Tensor


def grouped_scores(query: Tensor, key: Tensor) -> Tensor:
    """``query @ key^T`` in float32 where groups of query heads share a key head, (batch, num_heads, rows, columns)."""
    batch, num_heads, rows, head_dim = query.shape
    num_kv_heads = key.shape[1]
    groups = num_heads // num_kv_heads
    query = query.reshape(batch * num_kv_heads, groups * rows, head_dim)
    scores = query.float() @ key.flatten(0, 1).transpose(1, 2).float()
    return scores.reshape(batch, num_heads, rows, key.shape[2])


def capped(scores: Tensor, softcap: float | None) -> Tensor:
    """``softcap * tanh(scores / softcap)``; unchanged where softcap is None."""
    return scores if softcap is None else softcap * torch.tanh(scores / softcap)


def masked_softmax(scores: Tensor, visible: Tensor) -> Tensor:
    """Softmax over the visible entries of the last dimension, 0 elsewhere; a row that sees nothing comes out even, not 0.

    Overwrites `scores`: on CPUs new memory takes longer than the arithmetic.
    """
    scores.masked_fill_(~visible, torch.finfo(scores.dtype).min)
    if scores.device.type != "cpu" or torch.compiler.is_compiling():
        return scores.softmax(-1)
    return torch.softmax(scores, -1, out=scores)
