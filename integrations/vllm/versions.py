"""The interfaces of vLLM that the plug-in needs."""

from __future__ import annotations

import inspect
from typing import Any

import torch

from flexmask.integrations.serving.versions import faults_in, names_in
from flexmask.integrations.vllm.layers import ARGUMENTS, LATENT_ARGUMENTS

# as `faults_in` takes them: what the plug-in overrides, calls and reads
_EVERY: dict[str, tuple[str, ...] | set[str]] = {
    "builder.__init__": ("kv_cache_spec", "layer_names", "vllm_config", "device"),
    "builder.build": ("common_prefix_len", "common_attn_metadata", "fast_build"),
    "builder.build_for_cudagraph_capture": ("common_attn_metadata",),
    "builder.get_cudagraph_support": ("vllm_config", "kv_cache_spec"),
    "vllm.v1.worker.ubatch_utils.split_attn_metadata": ("ubatch_slices", "common_attn_metadata"),
    "vllm.v1.worker.ubatch_utils.UBatchSlice": ("request_slice", "token_slice"),
    "vllm.v1.attention.backend.CommonAttentionMetadata": {
        "query_start_loc_cpu", "seq_lens_cpu_upper_bound", "num_reqs", "block_table_tensor", "causal", "is_prefilling",
        "mm_req_doc_ranges",
    },
    "vllm.v1.attention.backend.AttentionCGSupport": {"UNIFORM_BATCH"},
    "vllm.compilation.backends": {"model_tag"},
    "vllm.config": {"get_current_vllm_config", "get_current_vllm_config_or_none"},
    "vllm.config.CompilationConfig": {"static_forward_context"},
    "vllm.config.ModelConfig": {"use_mla", "get_total_num_hidden_layers", "hf_text_config", "enable_sleep_mode"},
    "vllm.config.ParallelConfig": {"use_ubatching"},
    "implementation": {"scale"},
}  # fmt: skip
_NOT_LATENT: dict[str, tuple[str, ...] | set[str]] = {
    "implementation.forward": (
        "layer", "query", "key", "value", "kv_cache", "attn_metadata", "output", "output_scale", "output_block_scale",
    ),
    "implementation.do_kv_cache_update": ("layer", "key", "value", "kv_cache", "slot_mapping"),
    "implementation's arguments": ARGUMENTS,
    "an attention layer": {"_q_scale", "_k_scale", "_v_scale"},  # with an FP8 cache
}  # fmt: skip
_LATENT: dict[str, tuple[str, ...] | set[str]] = {
    "builder._init_reorder_batch_threshold": ("reorder_batch_threshold", "supports_spec_as_decode"),
    "implementation.forward_mha": (
        "q", "kv_c_normed", "k_pe", "kv_c_and_k_pe_cache", "attn_metadata", "k_scale", "output", "output_scale",
    ),
    "vllm.model_executor.layers.attention.mla_attention.MLAAttention.forward_impl": (
        "q", "k_c_normed", "k_pe", "kv_cache", "attn_metadata",
    ),
    # all but the arguments that the plug-in never reads
    "implementation's arguments": LATENT_ARGUMENTS - {"sinks", "q_lora_rank", "qk_rope_head_dim"},
    "builder": {"query_len_support", "reorder_batch_threshold", "_prefill_backend"},
    "vllm.v1.attention.backends.mla.prefill.base.MLAPrefillBackend": {"clone"},
    "vllm.model_executor.layers.attention.mla_attention.MLACommonMetadata": {"num_decodes", "num_decode_tokens"},
}  # fmt: skip


def _arguments(impl: type) -> set[str]:
    """Names of the arguments of ``__init__``, including those that base classes receive through keywords."""
    inits = [vars(base)["__init__"] for base in impl.__mro__ if "__init__" in vars(base) and base is not object]
    parameters = [inspect.signature(init).parameters for init in inits]
    passes = [any(parameter.kind is parameter.VAR_KEYWORD for parameter in of_init.values()) for of_init in parameters]
    num_inits = passes.index(False) + 1 if False in passes else len(inits)
    return {name for of_init in parameters[:num_inits] for name in of_init}


def _shape_of_cache(is_latent: bool) -> tuple[int, ...]:
    """The shape of a cache of 3 pages of 16 tokens, with 2 KV heads of 64 or latent rows of 576; () if vLLM does not say."""
    from vllm.v1 import kv_cache_interface as caches

    if not hasattr(caches, "compute_layer_kv_cache_shape_bytes"):
        return ()
    heads, width = (1, 576) if is_latent else (2, 64)
    kind = caches.MLAAttentionSpec if is_latent else caches.FullAttentionSpec
    # of int8, so that the shape in bytes is that in numbers
    spec = kind(block_size=16, num_kv_heads=heads, head_size=width, dtype=torch.int8)
    shape = tuple(caches.compute_layer_kv_cache_shape_bytes(spec, 3))
    return (shape[0], *shape[2:]) if is_latent else shape


def interface_faults(stock: Any) -> list[str]:
    """Differences between the installed vLLM and the interfaces that the plug-in needs; [] if none."""
    builder, impl, is_latent = stock.get_builder_cls(), stock.get_impl_cls(), stock.is_mla()
    found: dict[str, Any] = {"builder": builder, "implementation": impl, "implementation's arguments": _arguments(impl)}
    # pages, KV heads, tokens in a page, keys before values; or latent rows, whose one head vLLM drops
    wanted, shape = (3, 16, 576) if is_latent else (3, 2, 16, 128), _shape_of_cache(is_latent)
    faults = [] if shape == wanted else [f"the cache must have the shape {wanted}; got {shape}"]
    if not is_latent:
        from vllm.model_executor.layers.attention import attention

        found["an attention layer"] = names_in(attention, "set_default_quant_scales")
        if stock.forward_includes_kv_cache_update:
            faults.append("keys and values must be in the cache before forward runs")
    return faults_in(found, {**_EVERY, **(_LATENT if is_latent else _NOT_LATENT)}) + faults
