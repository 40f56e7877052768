"""The classes that vLLM loads: names, promises, the gate of releases, and the interfaces that are compared."""

import importlib
import logging
from contextlib import nullcontext
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

pytest.importorskip("vllm", reason="`make test-vllm` has it in an environment of its own")

import vllm
from vllm.model_executor.layers.attention.chunked_local_attention import create_chunked_local_attention_backend
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend as Stock
from vllm.v1.attention.backends.mla.triton_mla import TritonMLABackend as Latent
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

from flexmask.integrations.vllm import backends
from flexmask.integrations.vllm.registration import register
from flexmask.integrations.vllm.versions import interface_faults
from tests.vllm.cpu_plugin import flexmask_vllm_cpu

CPU = "v1.attention.backends.cpu_attn.CPUAttention"
LAYERS = "model_executor.layers.attention"
NAMES = [f"Sparse{kind}Attention" for kind in ("Flash", "Triton", "CPU", "TritonLatent", "CPULatent")]


@pytest.fixture
def overrides():
    yield
    for each in AttentionBackendEnum:
        each.clear_override()


@pytest.mark.parametrize("name", NAMES)
def test_vllm_finds_each_class_by_the_path_it_tells_with_the_promises_it_can_keep(name):
    backend = getattr(flexmask_vllm_cpu if "CPU" in name else backends, name)
    module, qualname = backend.full_cls_name()
    assert getattr(importlib.import_module(module), qualname) is backend
    assert backend.get_name() in AttentionBackendEnum.__members__
    impl, builder = backend.get_impl_cls(), backend.get_builder_cls()
    stock_impl, stock = backend.__mro__[1].get_impl_cls(), backend.__mro__[1].get_builder_cls()
    assert issubclass(impl, stock_impl)
    assert issubclass(builder, stock)
    assert not getattr(impl, "__abstractmethods__", None)
    attends = "forward_mha" if backend.is_mla() else "forward"
    assert getattr(impl, attends) is not getattr(stock_impl, attends)
    assert builder.build is not stock.build
    # promises that sparse prefill cannot keep are taken back
    supported = builder.get_cudagraph_support(SimpleNamespace(), SimpleNamespace())
    most = stock.get_cudagraph_support(SimpleNamespace(), SimpleNamespace())
    assert supported.value == min(most.value, AttentionCGSupport.UNIFORM_BATCH.value)
    assert not builder.supports_update_block_table
    assert not backend.supports_batch_invariance()
    assert backend.is_mla() == ("Latent" in name)
    assert not backend.get_impl_cls().fused_output_quant_supported(None, None)
    # what chunked local attention derives sees other requests than the batch has
    derived = create_chunked_local_attention_backend(backend, 8192).get_builder_cls()
    assert builder.flexmask_own is builder
    assert derived is not derived.flexmask_own is builder


def test_registration_names_custom_unless_it_is_taken_and_nothing_else(overrides):
    register()
    register()
    assert [each.name for each in AttentionBackendEnum if each.is_overridden()] == ["CUSTOM"]
    assert AttentionBackendEnum.CUSTOM.get_class() is backends.SparseFlashAttention
    with pytest.raises(AttributeError, match="no_such"):
        _ = backends.no_such
    # another plug-in's stays
    register_backend(AttentionBackendEnum.CUSTOM, "another.Backend")
    register()
    assert AttentionBackendEnum.CUSTOM.get_path() == "another.Backend"


@pytest.mark.parametrize(("is_latent", "name"), [(False, "SparseTritonAttention"), (True, "SparseTritonLatentAttention")])
def test_custom_wraps_the_kernel_of_the_options_for_the_model_s_attention(is_latent, name, monkeypatch):
    config = SimpleNamespace(model_config=SimpleNamespace(use_mla=is_latent))
    monkeypatch.setattr("vllm.config.get_current_vllm_config_or_none", lambda: config)
    engine = SimpleNamespace(options=SimpleNamespace(kernel="TRITON_ATTN"))
    monkeypatch.setattr("flexmask.integrations.vllm.engine.engine_of", lambda config: engine)
    assert backends.Custom is getattr(backends, name)


def test_latent_layers_prepare_ours_where_memory_is_measured(monkeypatch):
    from vllm.model_executor.layers.attention.mla_attention import MLAAttention

    from flexmask.integrations.vllm.backends import measure_latent_layers

    ran, prepared = [], []
    monkeypatch.setattr(MLAAttention, "forward_impl", lambda self, *arguments, **options: ran.append((arguments, options)))
    measure_latent_layers()
    measure_latent_layers()
    query = torch.zeros(1)
    engine = SimpleNamespace(prepare=lambda *device, in_profile: prepared.append((*device, in_profile)))
    for impl in (SimpleNamespace(flexmask=SimpleNamespace(engine=engine)), SimpleNamespace()):
        for metadata in (None, "a step"):
            MLAAttention.forward_impl(SimpleNamespace(impl=impl), query, 1, 2, 3, metadata, output=4)
    assert prepared == [(query.device, True)]
    assert ran == [((query, 1, 2, 3, metadata), {"output": 4}) for metadata in (None, "a step")] * 2


@pytest.mark.parametrize(
    ("version", "served", "told"),
    [
        ("0.31.0", pytest.raises(ImportError, match="no release of flexmask has served"), "no release of flexmask has served"),
        ("0.34.0", nullcontext(), "Its interfaces match, so flexmask runs"),
    ],
)
def test_other_releases_are_refused_or_warned_of_in_the_log(version, served, told, monkeypatch, caplog):
    monkeypatch.setattr(vllm, "__version__", version)
    monkeypatch.setattr(backends, "_backend", backends._backend.__wrapped__)
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    if version == "0.31.0":  # whose interfaces may be any
        monkeypatch.setattr(backends, "interface_faults", Mock(side_effect=AttributeError))
        monkeypatch.setattr(backends, "_backend_name_for_model", Mock(side_effect=AttributeError))
    with served:
        assert backends.Custom.get_name() == "CUSTOM"
    assert told in caplog.text


@pytest.mark.parametrize(
    ("stock", "name", "other", "fault"),
    [
        (Stock, f"{CPU}MetadataBuilder.build", lambda self, other: None, "builder.build must take common_prefix_len"),
        (Stock, f"{CPU}BackendImpl.__init__", lambda self, num_heads: None, "implementation must have scale"),
        (Stock, f"{CPU}BackendImpl.__init__", lambda self, num_heads: None, "implementation's arguments must have alibi_slopes"),
        (Stock, f"{CPU}Backend.forward_includes_kv_cache_update", True, "keys and values must be in the cache before"),
        (Stock, "v1.kv_cache_interface.compute_layer_kv_cache_shape_bytes", lambda *_: (2, 3), "(3, 2, 16, 128); got (2, 3)"),
        (Stock, "v1.worker.ubatch_utils.split_attn_metadata", None, "split_attn_metadata must take ubatch_slices"),
        (Stock, f"{LAYERS}.attention.set_default_quant_scales", lambda layer: layer._k_scale, "must have _q_scale, _v_scale"),
        (Latent, f"{LAYERS}.mla_attention.MLAAttention.forward_impl", lambda self, q: None, "must take q, k_c_normed"),
        (Latent, f"{LAYERS}.mla_attention.MLACommonImpl.forward_mha", lambda self, q: None, "must take q, kv_c_normed"),
        (Latent, "v1.attention.backends.mla.prefill.base.MLAPrefillBackend.clone", None, "PrefillBackend must have clone"),
        (Latent, f"{LAYERS}.mla_attention.MLACommonImpl.__init__", lambda self, num_heads: None, "kv_b_proj, kv_lora_rank"),
    ],
)
def test_interfaces_that_are_others_are_named(stock, name, other, fault, monkeypatch):
    """Of latent attention some arguments come as keywords, which it passes on."""
    assert interface_faults(stock) == []
    if other is None:
        monkeypatch.delattr(f"vllm.{name}")
    else:
        monkeypatch.setattr(f"vllm.{name}", other)
    assert any(fault in each for each in interface_faults(stock))
