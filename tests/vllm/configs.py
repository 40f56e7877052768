"""The part of vLLM's configuration that the plug-in reads."""

from types import SimpleNamespace

import torch


def config_of(options=None, layers=3, use_v2_model_runner=False, backend="CUSTOM", **server):
    model = SimpleNamespace(hf_config=SimpleNamespace(), dtype=torch.float32, max_model_len=32768, rswa_window=None, model="a")
    model.enable_sleep_mode = server.get("enable_sleep_mode", False)
    model.original_max_model_len = server.get("original_max_model_len")
    model.hf_text_config = SimpleNamespace(num_hidden_layers=layers)
    model.get_total_num_hidden_layers = lambda: layers
    sizes = dict.fromkeys(("tensor_parallel_size", "decode_context_parallel_size", "prefill_context_parallel_size"), 1)
    return SimpleNamespace(
        additional_config={"flexmask": options or {}},
        attention_config=SimpleNamespace(backend=SimpleNamespace(name=backend)),
        model_config=model,
        parallel_config=SimpleNamespace(**{"use_ubatching": False, **sizes, **server}),
        scheduler_config=SimpleNamespace(max_num_batched_tokens=1024),
        compilation_config=SimpleNamespace(static_forward_context={}),
        use_v2_model_runner=use_v2_model_runner,
    )
