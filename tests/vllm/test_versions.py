"""Interfaces that are compared before a vLLM starts."""

import pytest

pytest.importorskip("vllm", reason="`make test-vllm` has it in an environment of its own")

from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend as Stock

from flexmask.integrations.vllm.versions import interface_faults


def test_interfaces_that_are_others_are_named(monkeypatch):
    assert interface_faults(Stock) == []
    builder, impl = Stock.get_builder_cls(), Stock.get_impl_cls()

    class OtherBuilder(builder):
        def build(self, common_attn_metadata, fast_build=False):
            """Without common_prefix_len."""

    class OtherImpl(impl):
        def __init__(self, num_heads):
            """Without the others."""

    class Other(Stock):
        forward_includes_kv_cache_update = True

        @staticmethod
        def get_builder_cls():
            return OtherBuilder

        @staticmethod
        def get_impl_cls():
            return OtherImpl

    faults = interface_faults(Other)
    wanted = ("builder.build must take common_prefix_len", "arguments must have alibi_slopes", "in the cache before forward")
    assert len(faults) == len(wanted)
    assert all(part in fault for part, fault in zip(wanted, faults, strict=True))
    from vllm.model_executor.layers.attention import attention
    from vllm.v1.worker import ubatch_utils

    monkeypatch.delattr(ubatch_utils, "split_attn_metadata")
    assert "split_attn_metadata" in interface_faults(Stock)[0]
    monkeypatch.setattr(attention, "set_default_quant_scales", lambda layer: layer._k_scale)
    assert "an attention layer must have _q_scale, _v_scale" in interface_faults(Stock)


@pytest.mark.parametrize("shape", [(2, 3, 16, 2, 64), (3, 16, 2, 128), ()])
def test_a_cache_of_another_shape_is_named(shape):
    class Other(Stock):
        @staticmethod
        def get_kv_cache_shape(pages, page_size, heads, head_dim):
            """As backends have it until 0.28."""
            return shape

    assert interface_faults(Other) == [f"the cache must have the shape (3, 2, 16, 128); got {shape}"]


def test_interfaces_of_latent_attention(monkeypatch):
    from vllm.v1.attention.backends.mla.triton_mla import TritonMLABackend as Latent

    # its own arguments come as keywords, which it passes on
    assert interface_faults(Latent) == []
    impl = Latent.get_impl_cls()

    class OtherImpl(impl):
        def __init__(self, num_heads, head_size, scale, num_kv_heads, alibi_slopes, sliding_window, kv_cache_dtype):
            """Without those of latent attention."""

        def forward_mha(self, q, kv_c_normed, k_pe, kv_cache):
            """With fewer arguments."""

    class Other(Latent):
        @staticmethod
        def get_impl_cls():
            return OtherImpl

    faults = interface_faults(Other)
    assert len(faults) == 2
    assert "forward_mha must take q" in faults[0] and "kv_b_proj, kv_lora_rank" in faults[1]
    from vllm.model_executor.layers.attention import mla_attention
    from vllm.v1.attention.backends.mla.prefill import base

    monkeypatch.setattr(mla_attention.MLAAttention, "forward_impl", lambda self, q, kv: None)
    monkeypatch.delattr(base.MLAPrefillBackend, "clone")
    told = "; ".join(interface_faults(Latent))
    for fault in ("MLAAttention.forward_impl must take q, k_c_normed", "MLAPrefillBackend must have clone"):
        assert fault in told
