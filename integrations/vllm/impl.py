"""The attention implementation: the stock one, except long prefills of sparse layers, which go to `Engine.attend`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm.compilation import backends
from vllm.config import get_current_vllm_config

from flexmask._torch import HAS_TRITON
from flexmask.integrations.serving.chunk import concat_cached
from flexmask.integrations.serving.engine import StockBase
from flexmask.integrations.serving.layers import Role, SparseLayer
from flexmask.integrations.vllm.builder import Step
from flexmask.integrations.vllm.engine import DRAFT, engine_of
from flexmask.integrations.vllm.layers import bound_arguments
from flexmask.integrations.vllm.pages import FP8_CACHES, PageTable, gathered, kernel_serves, viewed_in_cache_dtype

if HAS_TRITON:
    from flexmask.integrations.vllm import pages_kernel


class PluginLayer:
    """The plug-in's part of one layer: the attribute ``flexmask`` of the layer's implementation."""

    def __init__(self, impl_args: dict[str, Any]) -> None:
        config = get_current_vllm_config()
        self.engine = engine_of(config)
        self.impl_args = impl_args  # the implementation's arguments by name
        self.cache_dtype: str = impl_args.get("kv_cache_dtype") or "auto"
        # vLLM tags the model it loads; a draft's layers may have the target's configuration
        is_draft = backends.model_tag == "draft_model" or backends.model_tag.endswith("_head")
        self.model: str = DRAFT if is_draft else config.model_config.model
        self.role: Role | None = None  # from `VLLMEngine.prepare` on

    def sparse_step(self, attn_metadata: Any, scale: float) -> tuple[SparseLayer, Step] | None:
        """The layer's role and the split step, or None if the layer runs stock in this step; counts the step's tokens."""
        step: Step | None = getattr(attn_metadata, "flexmask_step", None)
        role = self.role
        if step is None or not isinstance(role, SparseLayer):
            return None
        # kernels are compiled for the scale at construction; vLLM's Transformers backend sets another in every forward
        reason = None if scale == role.scale else f"a layer made with scale {role.scale:g} has scale {scale:g}"
        self.engine.count_step(role, step.split, reason)
        return (role, step) if reason is None and step.sparse else None


class PluginMixin(StockBase):  # type: ignore[misc]
    """Mixin before a stock implementation."""

    flexmask_kernel = ""  # vLLM's name of the stock backend

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.flexmask = PluginLayer(bound_arguments(super().__init__, *arguments, **options))

    def fused_output_quant_supported(self, quant_key: Any) -> bool:
        """Return False: sparse rows are written unquantized."""
        return False


class SparsePrefillImpl(PluginMixin):
    """Mixin before a stock implementation that splits a step's rows."""

    def forward(
        self, layer: Any, query: Tensor, key: Tensor, value: Tensor, kv_cache: Tensor, attn_metadata: Any, output: Tensor,
        output_scale: Tensor | None = None, output_block_scale: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        scales = (output_scale, output_block_scale)
        if attn_metadata is None:  # memory is measured, or the model is compiled
            self.flexmask.engine.prepare(query.device, in_profile=True)
        role_and_step = self.flexmask.sparse_step(attn_metadata, float(self.scale))
        if role_and_step is None:
            return super().forward(layer, query, key, value, kv_cache, attn_metadata, output, *scales)
        role, step = role_and_step
        for rows, metadata in step.stock:
            super().forward(layer, query[rows], key[rows], value[rows], kv_cache, metadata, output[rows], *scales)
        sinks = getattr(self, "sinks", None)
        # kernels are compiled for inference tensors, which parameters are not
        sinks = None if sinks is None else sinks.clone()
        for rows, request, page_table in step.sparse:
            queries = query[rows]
            if queries.dtype != output.dtype:  # kernels for FP8 caches get quantized queries
                scale = layer._q_scale.view(-1, 1)
                by_head = scale if len(scale) == 1 else scale.repeat_interleave(role.num_heads // role.num_kv_heads, 0)
                queries = viewed_in_cache_dtype(queries, self.flexmask.cache_dtype).to(output.dtype).mul_(by_head)
            if page_table is not None and role.window is not None:
                # vLLM frees pages before the window of the first row
                page_table = page_table.since(max(0, request.cached_len - role.window + 1))
            # keys and values have no name here, so that one request's are freed before the next one's are made
            self.flexmask.engine.attend(
                role,
                request,
                queries,
                *self.flexmask_keys_and_values(layer, kv_cache, page_table, (key[rows], value[rows])),
                sinks,
                out=output[rows],
            )
        return output

    def flexmask_keys_and_values(
        self, layer: Any, kv_cache: Tensor, page_table: PageTable | None, chunk: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor]:
        """A request's keys and values, zero before the table's first token. Gathered rows are freed before this returns."""
        if page_table is not None and kernel_serves(kv_cache, chunk):
            return pages_kernel.keys_and_values(kv_cache, page_table, chunk)
        cache_dtype = self.flexmask.cache_dtype
        scales = (layer._k_scale, layer._v_scale) if cache_dtype in FP8_CACHES else (None, None)
        cached: tuple[Tensor | None, Tensor | None] = (None, None)
        if page_table is not None:
            keys, values = self.flexmask_gather(layer, kv_cache, page_table)
            cached = viewed_in_cache_dtype(keys, cache_dtype), viewed_in_cache_dtype(values, cache_dtype)
        skipped = 0 if page_table is None else page_table.first
        key, value = (concat_cached(*part, skipped) for part in zip(cached, chunk, scales, strict=True))
        return key, value

    def flexmask_gather(self, layer: Any, kv_cache: Tensor, page_table: PageTable) -> tuple[Tensor, Tensor]:
        """Keys and values of these tokens from the cache, (num_kv_heads, tokens, head_dim) each."""
        return gathered(kv_cache, page_table, self.flexmask.impl_args["head_size"])


class SparseLatentImpl(PluginMixin):
    """Mixin before a stock implementation of multi-head latent attention (DeepSeek), whose prefills are plain attention."""

    def forward_mha(
        self, q: Tensor, kv_c_normed: Tensor, k_pe: Tensor, kv_c_and_k_pe_cache: Tensor, attn_metadata: Any, k_scale: Tensor,
        output: Tensor, output_scale: Tensor | None = None,
    ) -> None:  # fmt: skip
        """Attention of one step's prefills, whose rows follow the decoding rows."""
        role_and_step = self.flexmask.sparse_step(attn_metadata, float(self.scale))
        if role_and_step is None:
            super().forward_mha(q, kv_c_normed, k_pe, kv_c_and_k_pe_cache, attn_metadata, k_scale, output, output_scale)
            return
        role, step = role_and_step
        for rows, metadata in step.stock:
            part = (q[rows], kv_c_normed[rows], k_pe[rows])
            super().forward_mha(*part, kv_c_and_k_pe_cache, metadata, k_scale, output[rows], output_scale)
        for rows, request, page_table in step.sparse:
            # keys and values have no name here, so that one request's are freed before the next one's are made
            output[rows] = self.flexmask.engine.attend(
                role, request, q[rows], *self.flexmask_expanded(kv_c_and_k_pe_cache, page_table, kv_c_normed[rows], k_pe[rows])
            ).flatten(1)

    def flexmask_expanded(
        self, kv_cache: Tensor, page_table: PageTable | None, latent: Tensor, rotated: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Keys and values of every head, expanded from the latent rows of a request's cached tokens and of its chunk."""
        if page_table is not None:
            page, offset = page_table.pages_and_offsets(kv_cache.shape[1])
            cached = kv_cache[page, offset].split([latent.shape[-1], rotated.shape[-1]], -1)
            latent, rotated = torch.cat([cached[0], latent]), torch.cat([cached[1].unsqueeze(1), rotated])
        nope, width = self.qk_nope_head_dim, self.v_head_dim
        by_head = self.kv_b_proj(latent)[0].view(-1, self.num_heads, nope + width).transpose(0, 1)
        key = by_head.new_empty((*by_head.shape[:2], nope + rotated.shape[-1]))
        key[..., :nope] = by_head[..., :nope]
        key[..., nope:] = rotated.transpose(0, 1)
        return key, by_head[..., nope:].contiguous()
