"""Tensors for tests of single kernels, on the GPU or for Triton's interpreter, which has no bfloat16 arithmetic."""

import torch
from torch import Tensor

from flexmask.base.inputs import AttentionInputs
from flexmask.base.visibility import Tokens, token_validity

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HALF = (torch.float16, torch.bfloat16) if DEVICE == "cuda" else (torch.float16,)
LAYOUTS = ("transposed", "stepped", "expanded")


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def float64(x: float) -> Tensor:
    return torch.full((), x, dtype=torch.float64, device=DEVICE)


def by_head(gamma: float | list[float], heads: int) -> Tensor:
    return torch.tensor(gamma, dtype=torch.float64, device=DEVICE).expand(heads).contiguous()


def call_of(
    query: Tensor, key: Tensor, window: int | None = None, padded: bool = False, softcap: float | None = None
) -> AttentionInputs:
    """The inputs of a call whose last row stands at the last key, some of its tokens padding if `padded`."""
    batch, kv_len = query.shape[0], key.shape[2]
    mask = (torch.rand(batch, kv_len, generator=torch.Generator().manual_seed(2)) < 0.7).to(DEVICE) if padded else None
    return AttentionInputs(query, key, None, query.shape[3] ** -0.5, softcap, window, mask).with_offset()


def geometry(batch: int, q_len: int, kv_len: int, padded: bool = False, window: int | None = None) -> AttentionInputs:
    """`call_of` one head of lengths only."""
    query, key = (torch.empty(batch, 1, length, 16, device=DEVICE) for length in (q_len, kv_len))
    return call_of(query, key, window, padded)


def tokens_of(inputs: AttentionInputs) -> Tokens:
    query, key = inputs.query, inputs.key
    return token_validity(query.shape[2], key.shape[2], inputs.offset, inputs.attention_mask, key)


def in_layout(layout: str, batch: int, heads: int, length: int, head_dim: int, seed: int = 0) -> Tensor:
    """(batch, heads, length, head_dim) with strides as callers bring them."""
    if layout == "transposed":  # Hugging Face's: heads inside tokens
        return normal(batch, length, heads, head_dim, seed=seed).transpose(1, 2)
    if layout == "stepped":  # between all entries lie others
        return normal(2 * batch, 2 * heads, 3 * length, 2 * head_dim, seed=seed)[::2, 1::2, ::3, 1::2]
    return normal(1, 1, length, head_dim, seed=seed).expand(batch, heads, -1, -1)
