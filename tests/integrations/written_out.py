"""Attention of transformers written out in float64, under given maps of visible keys."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_mask
from transformers import AttentionInterface, AttentionMaskInterface

from tests.expected import masked_attention

NAME = "written-out"
# by layer
_MASKS: dict[int, list[BlockMask]] = {}


@contextmanager
def written_out(model: Any, masks: dict[int, list[BlockMask | None]]) -> Iterator[None]:
    """Run a model with `masks`, those of each layer's prefill calls."""
    AttentionInterface.register(NAME, _attention)
    AttentionMaskInterface.register(NAME, _mask)
    former = model.config._attn_implementation
    model.set_attn_implementation(NAME)
    _MASKS.clear()
    _MASKS.update({layer: [mask for mask in calls if mask is not None] for layer, calls in masks.items()})
    try:
        yield
        assert not any(_MASKS.values()), "fewer prefill calls than masks"
    finally:
        model.set_attn_implementation(former)


def _mask(*, allow_is_causal_skip: bool = False, **arguments: Any) -> Tensor:
    """SDPA's map, (batch, 1, q_len, kv_len) bool."""
    return AttentionMaskInterface()["sdpa"](allow_is_causal_skip=False, **arguments)


def _attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor,
    scaling: float,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    batch, num_heads, q_len, _ = query.shape
    visible = attention_mask[..., : key.shape[2]].expand(batch, num_heads, -1, -1)
    if q_len > 1:
        mask = _MASKS[module.layer_idx].pop(0)
        kv_len = mask.shape[3]
        chosen = create_mask(mask.mask_mod, batch, num_heads, q_len, kv_len, device=query.device)
        assert chosen.shape == visible.shape
        assert not (chosen & ~visible).any(), "a mask shows what transformers hides"
        visible = chosen
    out, _ = masked_attention(query, key, value, visible, scaling, softcap, s_aux)
    return out.to(query.dtype).transpose(1, 2).contiguous(), None
