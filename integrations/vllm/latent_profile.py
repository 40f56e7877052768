"""Prepares sparse layers of latent attention while vLLM measures memory."""

from __future__ import annotations

import functools
from typing import Any


def measure_latent_layers() -> None:
    """Make vLLM's layer of latent attention call ours when it runs without metadata and skips its implementation."""
    from vllm.model_executor.layers.attention import mla_attention

    layer: Any = mla_attention.MLAAttention
    stock = layer.forward_impl
    if hasattr(stock, "flexmask_measures"):
        return

    @functools.wraps(stock)
    def forward_impl(
        self: Any, q: Any, k_c_normed: Any, k_pe: Any, kv_cache: Any, attn_metadata: Any, *arguments: Any, **options: Any
    ) -> Any:
        prepare = getattr(self.impl, "flexmask_prepare", None)
        if attn_metadata is None and prepare is not None:
            prepare(q.device)
        return stock(self, q, k_c_normed, k_pe, kv_cache, attn_metadata, *arguments, **options)

    forward_impl.flexmask_measures = True  # type: ignore[attr-defined]
    layer.forward_impl = forward_impl
