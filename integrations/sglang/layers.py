"""The shape of an attention layer of SGLang, or why it runs stock."""

from __future__ import annotations

from typing import Any

import torch

from flexmask.integrations.serving.layers import LayerShape

FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)


def shape_of(layer: Any) -> LayerShape:
    """The shape of one attention layer (``RadixAttention``) on this rank."""
    return LayerShape(
        num_heads=layer.tp_q_head_num,
        num_kv_heads=layer.tp_k_head_num,
        head_dim=layer.qk_head_dim,
        v_head_dim=layer.v_head_dim,
        scale=float(layer.scaling),
        softcap=layer.logit_cap or None,
    )


def layer_reason(layer: Any, pool: Any, dtype: torch.dtype) -> str | None:
    """Return why a layer runs stock in every step, or None; its keys and values are in `pool`."""
    # a hybrid model has several pools; that of its attention layers decides
    if type(pool).__name__ == "HybridLinearKVPool":
        pool = pool.full_kv_pool
    if layer.attn_type.value != "decoder":
        return f"attention of type {layer.attn_type.value}"
    if layer.is_cross_attention:
        return "cross attention"
    # the only pool that is written and read row by row
    if type(pool).__name__ != "MHATokenToKVPool":
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
