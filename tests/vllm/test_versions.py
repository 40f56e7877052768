"""Interfaces that are compared before a vLLM starts; the entry point."""

from types import SimpleNamespace

import pytest

from flexmask.integrations.vllm.versions import interface_faults
from tests.repository import ROOT


def test_interfaces_that_are_others_are_named(monkeypatch):
    pytest.importorskip("vllm", reason="`make test-vllm` has it in an environment of its own")
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend as Stock

    assert interface_faults(Stock) == []
    builder, impl = Stock.get_builder_cls(), Stock.get_impl_cls()

    class OtherBuilder(builder):
        def build(self, common_attn_metadata, fast_build=False):
            """Without common_prefix_len."""

    class OtherImpl(impl):
        def __init__(self, num_heads):
            """Without the others."""

    classes = {"get_builder_cls": lambda: OtherBuilder, "get_impl_cls": lambda: OtherImpl, "is_mla": lambda: False}
    faults = interface_faults(SimpleNamespace(**classes, forward_includes_kv_cache_update=True))
    wanted = ("builder.build must take common_prefix_len", "arguments must have alibi_slopes", "in the cache before forward")
    assert len(faults) == len(wanted)
    assert all(part in fault for part, fault in zip(wanted, faults, strict=True))
    from vllm.v1.worker import ubatch_utils

    monkeypatch.delattr(ubatch_utils, "split_attn_metadata")
    assert "split_attn_metadata" in interface_faults(Stock)[0]


def test_interfaces_of_latent_attention():
    pytest.importorskip("vllm", reason="`make test-vllm` has it in an environment of its own")
    from vllm.v1.attention.backends.mla.triton_mla import TritonMLABackend as Stock

    # its own arguments come as keywords, which it passes on
    assert interface_faults(Stock) == []
    builder, impl = Stock.get_builder_cls(), Stock.get_impl_cls()

    class OtherImpl(impl):
        def __init__(self, num_heads, head_size, scale, num_kv_heads, alibi_slopes, sliding_window, kv_cache_dtype):
            """Without those of latent attention."""

        def forward_mha(self, q, kv_c_normed, k_pe, kv_cache):
            """With fewer arguments."""

    classes = {"get_builder_cls": lambda: builder, "get_impl_cls": lambda: OtherImpl, "is_mla": lambda: True}
    faults = interface_faults(SimpleNamespace(**classes))
    assert len(faults) == 2
    assert "forward_mha must take q" in faults[0] and "kv_b_proj, kv_lora_rank" in faults[1]


def test_entry_point_names_the_registration():
    tomllib = pytest.importorskip("tomllib", reason="Python 3.10 cannot read TOML")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["entry-points"]["vllm.general_plugins"] == {"flexmask": "flexmask.integrations.vllm.registration:register"}
