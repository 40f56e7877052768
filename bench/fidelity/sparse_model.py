"""Models that attend to chosen blocks: the attention functions, and switching them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from flexmask._torch import block_mask_from_lists
from flexmask.flex.backend import kernel_options

_method: Callable[[Tensor, Tensor, float], Tensor] | None = None
_look: Callable[[Tensor, Tensor, Tensor, float], None] | None = None
_densities: list[Tensor] = []
_compiled = torch.compile(flex_attention, dynamic=False)


def _causal(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return k <= q


def block_mask(keep: Tensor, tokens: int) -> BlockMask:
    """The BlockMask of a causal map of whole blocks: its diagonal is partial, the rest full."""
    blocks, size = keep.shape[-1], tokens // keep.shape[-1]
    diagonal = torch.eye(blocks, dtype=torch.bool, device=keep.device)
    lists = []
    for part in (keep & diagonal, keep & ~diagonal):
        index = part.to(torch.int8).argsort(dim=-1, descending=True, stable=True).to(torch.int32)
        lists.append((part.sum(-1, dtype=torch.int32), index.contiguous()))
    of_partial, of_full = lists
    return block_mask_from_lists((*of_partial, *of_full), _causal, size, (tokens, tokens))


def sparse_attention(query: Tensor, key: Tensor, value: Tensor, keep: Tensor, scale: float) -> Tensor:
    """Attention to the kept blocks; key and value have as many heads as query."""
    if query.is_cuda:
        options: Any = kernel_options("triton", query.shape[2] // keep.shape[-1], query.shape[3], query.dtype)
        return _compiled(query, key, value, block_mask=block_mask(keep, query.shape[2]), scale=scale, kernel_options=options)
    size = query.shape[2] // keep.shape[-1]
    seen = keep.repeat_interleave(size, -2).repeat_interleave(size, -1).tril()
    return F.scaled_dot_product_attention(query, key, value, attn_mask=seen, scale=scale)


def _attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, scaling: float | None = None, **kwargs: Any
) -> tuple[Tensor, None]:
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if _look is not None:
        _look(query, key, value, scale)
    group = query.shape[1] // key.shape[1]
    keys, values = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    dense = _method is None or module.layer_idx in getattr(_method, "dense_layers", ())
    if dense and _method is not None and query.shape[2] > 1:
        _densities.append(torch.ones(query.shape[1], device=query.device))
    if query.shape[2] == 1 or dense:
        out = F.scaled_dot_product_attention(query, keys, values, is_causal=query.shape[2] > 1, scale=scale)
    else:
        assert _method is not None
        keep = _method(query, key, scale)
        _densities.append(keep.sum((0, 2, 3)) / (keep.shape[0] * sum(range(keep.shape[-1] + 1))))
        out = sparse_attention(query, keys, values, keep, scale)
    return out.transpose(1, 2).contiguous(), None


def prepare(model: PreTrainedModel) -> PreTrainedModel:
    """Make `model` attend through this module."""
    AttentionInterface.register("fidelity", _attention)
    AttentionMaskInterface.register("fidelity", lambda *args, **kwargs: None)
    model.set_attn_implementation("fidelity")
    return model


@contextmanager
def attending(
    method: Callable[[Tensor, Tensor, float], Tensor] | None,
    look: Callable[[Tensor, Tensor, Tensor, float], None] | None = None,
) -> Iterator[list[Tensor]]:
    """Prefill with `method` (None: dense) inside; yields the densities of every layer call, (num_heads,) each.

    `look` is shown query, key, value and scale of every layer call.
    """
    global _method, _look
    _method, _look = method, look
    _densities.clear()
    try:
        yield _densities
    finally:
        _method = _look = None
