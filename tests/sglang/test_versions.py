"""Interfaces that are compared before an SGLang starts."""

import dataclasses

import pytest

from flexmask.integrations.serving.versions import fields_of
from flexmask.integrations.sglang.versions import interface_faults


def test_the_installed_one_fits_and_changes_are_named(monkeypatch):
    pytest.importorskip("sglang", reason="`make test-sglang` has it in an environment of its own")
    from sglang.srt import server_args
    from sglang.srt.layers import radix_attention
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
    from sglang.srt.model_executor import forward_batch_info

    assert interface_faults(TorchNativeAttnBackend) == []

    class Other:
        def __init__(self, num_heads, new):
            pass

        def set_kv_buffer(self, cache_k):
            pass

    monkeypatch.setattr(radix_attention, "RadixAttention", Other)
    monkeypatch.setattr(MHATokenToKVPool, "set_kv_buffer", Other.set_kv_buffer)
    monkeypatch.setattr(forward_batch_info.ForwardBatch, "__dataclass_fields__", {})
    options = dataclasses.make_dataclass("ServerArgs", fields_of(server_args.ServerArgs) - {"enable_pdmux"})
    monkeypatch.setattr(server_args, "ServerArgs", options)
    told = "; ".join(interface_faults(Other))
    assert "backend.forward_extend must take q, k, v, layer, forward_batch, save_kv_cache; got none" in told
    assert "backend.init_forward_metadata_out_graph must take forward_batch; got none" in told
    assert "pool.set_kv_buffer must take layer, ..., cache_k, cache_v, k_scale, v_scale; got cache_k" in told
    assert "ForwardBatch must have batch_size" in told
    assert "ServerArgs must have enable_pdmux" in told
    assert "RadixAttention must take" in told and "got new, num_heads" in told
