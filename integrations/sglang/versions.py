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
_OF_POOLS: dict[str, tuple[str | None, ...]] = {
    "set_kv_buffer": ("layer", None, "cache_k", "cache_v", "k_scale", "v_scale"),
    "get_key_buffer": ("layer_id",),
    "get_value_buffer": ("layer_id",),
}
# as `faults_in` takes them: what the plug-in overrides, calls and reads
_WANTED: dict[str, tuple[str | None, ...] | set[str]] = {
    "backend.__init__": (None,),
    "backend.init_forward_metadata": ("forward_batch",),
    "backend.init_forward_metadata_out_graph": ("forward_batch",),
    "backend.forward_extend": ("q", "k", "v", "layer", "forward_batch", "save_kv_cache"),
    "sglang.srt.model_executor.forward_batch_info.ForwardBatch.init_new": ("batch", "model_runner"),
    "sglang.srt.managers.tokenizer_manager.TokenizerManager._create_tokenized_object": ("obj",),
    **{
        f"sglang.srt.mem_cache.memory_pool.{pool}.{name}": arguments
        for pool in ("MHATokenToKVPool", "HybridLinearKVPool")
        for name, arguments in _OF_POOLS.items()
    },
    "sglang.srt.model_executor.forward_batch_info.ForwardBatch": {
        "forward_mode", "batch_size", "req_pool_indices", "seq_lens", "seq_lens_cpu", "seq_lens_sum", "out_cache_loc", "rids",
        "positions", "spec_info", "encoder_lens", "multi_item_delimiter_indices", "extend_num_tokens", "extend_seq_lens",
        "extend_prefix_lens", "extend_start_loc", "extend_seq_lens_cpu", "extend_prefix_lens_cpu",
    },
    "sglang.srt.model_executor.forward_batch_info.ForwardMode": {"EXTEND", "MIXED"},
    "sglang.srt.server_args.ServerArgs": {*REFUSED, *MUST_BE_ONE, "chunked_prefill_size", "enable_metrics", "tp_size"},
}  # fmt: skip


def interface_faults(stock: Any) -> list[str]:
    """Differences between the installed SGLang with a stock backend and the interfaces that the plug-in needs; [] if none."""
    from sglang.srt.layers.radix_attention import RadixAttention

    faults = faults_in({"backend": stock}, _WANTED)
    arguments = set(inspect.signature(RadixAttention).parameters)
    if arguments != _LAYER_ARGUMENTS:
        faults.append(f"RadixAttention must take {', '.join(sorted(_LAYER_ARGUMENTS))}; got {', '.join(sorted(arguments))}")
    return faults
