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

    assert interface_faults(TorchNativeAttnBackend) == []

    class Other:
        def __init__(self, num_heads, new):
            pass

    monkeypatch.setattr(radix_attention, "RadixAttention", Other)
    options = dataclasses.make_dataclass("ServerArgs", fields_of(server_args.ServerArgs) - {"enable_pdmux"})
    monkeypatch.setattr(server_args, "ServerArgs", options)
    told = "; ".join(interface_faults(Other))
    assert "backend.forward_extend must take q, k, v, layer, forward_batch, save_kv_cache; got none" in told
    assert "backend.init_forward_metadata_out_graph must take forward_batch; got none" in told
    assert "ServerArgs must have enable_pdmux" in told
    assert "RadixAttention must take" in told and "got new, num_heads" in told
