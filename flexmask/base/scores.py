"""Attention scores: grouped heads, soft cap, softmax over visible entries."""

from __future__ import annotations

import torch
from torch import Tensor

from flexmask._torch import HAS_BMM_TO_FLOAT32, is_traced


def grouped_scores(query: Tensor, key: Tensor) -> Tensor:
    """``query @ key^T`` in float32 where groups of query heads share a key head, (batch, num_heads, rows, columns)."""
    batch, num_heads, rows, head_dim = query.shape
    num_kv_heads = key.shape[1]
    groups = num_heads // num_kv_heads
    query = query.reshape(batch * num_kv_heads, groups * rows, head_dim)
    scores = query.float() @ key.flatten(0, 1).transpose(1, 2).float()
    return scores.reshape(batch, num_heads, rows, key.shape[2])


def products(query: Tensor, key: Tensor) -> Tensor:
    """As `grouped_scores`; on CUDA half-precision operands go to tensor cores as they are: exact products, summed in float32."""
    half = query.dtype == key.dtype and query.dtype in (torch.float16, torch.bfloat16)
    if not (half and query.is_cuda and HAS_BMM_TO_FLOAT32):
        return grouped_scores(query, key)
    batch, num_heads, rows, head_dim = query.shape
    num_kv_heads = key.shape[1]
    together = query.reshape(batch * num_kv_heads, num_heads // num_kv_heads * rows, head_dim)
    scores = torch.bmm(together, key.flatten(0, 1).transpose(1, 2), out_dtype=torch.float32)
    return scores.reshape(batch, num_heads, rows, key.shape[2])


def capped(scores: Tensor, softcap: float | None) -> Tensor:
    """``softcap * tanh(scores / softcap)``; unchanged where softcap is None."""
    return scores if softcap is None else softcap * torch.tanh(scores / softcap)


def masked_softmax(scores: Tensor, visible: Tensor) -> Tensor:
    """Softmax over the visible entries of the last dimension, 0 elsewhere; a row that sees nothing comes out even, not 0.

    Overwrites `scores`: on CPUs new memory takes longer than the arithmetic.
    """
    scores.masked_fill_(~visible, torch.finfo(scores.dtype).min)
    if scores.device.type != "cpu" or is_traced():
        return scores.softmax(-1)
    return torch.softmax(scores, -1, out=scores)
