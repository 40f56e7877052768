"""The interfaces of SGLang that the plug-in needs."""

from __future__ import annotations

import inspect
from typing import Any

from flexmask.integrations.serving.versions import faults_in
from flexmask.integrations.sglang.engine import MUST_BE_ONE, REFUSED

# all arguments of a layer that flexmask knows; one that a release adds may change attention
_LAYER_ARGUMENTS = {
    "num_heads", "head_dim", "scaling", "num_kv_heads", "layer_id", "logit_cap", "v_head_dim", "sliding_window_size",
    "is_cross_attention", "pos_encoding_mode", "logit_capping_method", "quant_config", "attn_type", "use_irope", "prefix",
    "use_prefill_attention_wrapper",
}  # fmt: skip
# as `faults_in` takes them: what the plug-in overrides, calls and reads
_WANTED: dict[str, tuple[str | None, ...] | set[str]] = {
    "backend.__init__": (None,),
    "backend.init_forward_metadata": ("forward_batch",),
    "backend.init_forward_metadata_out_graph": ("forward_batch",),
    "backend.forward_extend": ("q", "k", "v", "layer", "forward_batch", "save_kv_cache"),
    "batch.init_new": ("batch", "model_runner"),
    "tokenizer._create_tokenized_object": ("obj",),
    "pool.set_kv_buffer": ("layer", None, "cache_k", "cache_v", "k_scale", "v_scale"),
    "pool.get_key_buffer": ("layer_id",),
    "pool.get_value_buffer": ("layer_id",),
    "HybridLinearKVPool.set_kv_buffer": ("layer", None, "cache_k", "cache_v", "k_scale", "v_scale"),
    "HybridLinearKVPool.get_key_buffer": ("layer_id",),
    "HybridLinearKVPool.get_value_buffer": ("layer_id",),
    "ForwardBatch": {
        "forward_mode", "batch_size", "req_pool_indices", "seq_lens", "seq_lens_cpu", "seq_lens_sum", "out_cache_loc", "rids",
        "positions", "spec_info", "encoder_lens", "multi_item_delimiter_indices", "extend_num_tokens", "extend_seq_lens",
        "extend_prefix_lens", "extend_start_loc", "extend_seq_lens_cpu", "extend_prefix_lens_cpu",
    },
    "ForwardMode": {"EXTEND", "MIXED"},
    "ServerArgs": {*REFUSED, *MUST_BE_ONE, "chunked_prefill_size", "enable_metrics", "tp_size"},
}  # fmt: skip


def interface_faults(stock: Any) -> list[str]:
    """Differences between the installed SGLang with a stock backend and the interfaces that the plug-in needs; [] if none."""
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.managers.tokenizer_manager import TokenizerManager
    from sglang.srt.mem_cache.memory_pool import HybridLinearKVPool, MHATokenToKVPool
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
    from sglang.srt.server_args import ServerArgs

    found = {cls.__name__: cls for cls in (ForwardBatch, ForwardMode, ServerArgs)}
    found |= {"backend": stock, "batch": ForwardBatch, "tokenizer": TokenizerManager, "pool": MHATokenToKVPool}
    faults = faults_in({**found, "HybridLinearKVPool": HybridLinearKVPool}, _WANTED)
    arguments = set(inspect.signature(RadixAttention).parameters)
    if arguments != _LAYER_ARGUMENTS:
        faults.append(f"RadixAttention must take {', '.join(sorted(_LAYER_ARGUMENTS))}; got {', '.join(sorted(arguments))}")
    return faults
