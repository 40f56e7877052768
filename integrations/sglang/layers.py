"""The role of one of SGLang's attention layers."""

from __future__ import annotations

from typing import Any

import torch

from flexmask.integrations.serving.layers import LayerShape, SparseLayer, role_of_shape
from flexmask.settings import PrefillSettings

POOLS = ("MHATokenToKVPool",)  # pools of keys and values that are written and read row by row
# a pool of the attention layers, of such a kind, beside those that keep a state
MIXTURES = ("HybridLinearKVPool",)
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)


def role_of_layer(
    layer: Any, pool: Any, settings: PrefillSettings, dtype: torch.dtype, rank: int = 0, ranks: int = 1
) -> SparseLayer | str:
    """The role of one ``RadixAttention`` of a rank, whose keys and values are in `pool`. Raises as `role_of_shape`."""
    reason = _reason(layer, pool, dtype)
    if reason is not None:
        return reason
    shape = LayerShape(
        num_heads=layer.tp_q_head_num,
        num_kv_heads=layer.tp_k_head_num,
        head_dim=layer.qk_head_dim,
        v_head_dim=layer.v_head_dim,
        scale=float(layer.scaling),
        softcap=layer.logit_cap or None,
    )
    return role_of_shape(shape, layer.layer_id, settings, rank, ranks)


def _reason(layer: Any, pool: Any, dtype: torch.dtype) -> str | None:
    if type(pool).__name__ in MIXTURES:
        pool = pool.full_kv_pool
    if layer.attn_type.value != "decoder":
        return f"attention of type {layer.attn_type.value}"
    if layer.is_cross_attention:
        return "cross attention"
    if type(pool).__name__ not in POOLS:
        return f"a cache of type {type(pool).__name__}"
    if getattr(pool, "is_quantized_kv_cache", False):
        return "a quantized cache"
    if pool.dtype not in (dtype, *FP8):
        return f"a cache of {str(pool.dtype).removeprefix('torch.')}"
    if getattr(pool, "use_hnd", False):
        return "a cache with heads before tokens"
    if layer.sliding_window_size is not None and layer.sliding_window_size > -1:
        return f"a sliding window of {layer.sliding_window_size + 1}"
    if layer.v_head_dim != layer.qk_head_dim:
        return f"values {layer.v_head_dim} wide beside keys {layer.qk_head_dim} wide"
    if layer.pos_encoding_mode != "NONE":
        return f"positions of kind {layer.pos_encoding_mode}"
    if layer.logit_cap and layer.logit_capping_method != "tanh":
        return f"a soft cap by {layer.logit_capping_method}"
    if layer.xai_temperature_len > 0:
        return "a temperature by position"
    if layer.use_irope:
        return "chunked local attention"
    return None
