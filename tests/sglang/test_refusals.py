"""Refused servers and interfaces, the kernel for everything else, and the largest call."""

import re
from types import SimpleNamespace

import pytest

pytest.importorskip("sglang", reason="`make test-sglang` has it in an environment of its own")

import sglang

from flexmask.integrations.serving import versions
from flexmask.integrations.sglang.backend import largest_call, make_backend
from flexmask.integrations.sglang.engine import MUST_BE_ONE, REFUSED, refuse_model, refuse_server
from flexmask.integrations.sglang.options import stock_kernel
from flexmask.integrations.sglang.versions import interface_faults


def with_prefill(backend):
    return SimpleNamespace(prefill=SimpleNamespace(backend=backend))


def server(prefill="flexmask", decode="fa3", **others):
    given = {**dict.fromkeys(REFUSED, False), **dict.fromkeys(MUST_BE_ONE, 1), **others}
    return SimpleNamespace(prefill_attention_backend=prefill, decode_attention_backend=decode, **given)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"uses_mla": True}, "does not support multi-head latent attention"),
        ({"decode": "flexmask"}, "--decode-attention-backend must not be 'flexmask', which only prefills"),
        *(({name: True}, f"{name} must be off .* does not support {re.escape(feature)}") for name, feature in REFUSED.items()),
        ({"disaggregation_mode": "prefill"}, "disaggregation_mode must be off .* prefill/decode disaggregation"),
        ({"speculative_algorithm": "NGRAM"}, "speculative_algorithm must be off .* speculative decoding"),
        ({"attn_cp_size": 2}, "attn_cp_size must be 1 .* got 2"),
        ({"dcp_size": 4}, "dcp_size must be 1 .* got 4"),
        ({"SGLANG_RUST_SERVER": 1}, "SGLANG_RUST_SERVER must be off"),
        ({"cuda_graph_config": with_prefill("full")}, "cuda_graph_config must not have the backend 'full' for prefill"),
    ],
)
def test_servers_that_cannot_be_served_are_refused_by_name(given, message, monkeypatch):
    off = {"dcp_size": None, "disaggregation_mode": "null", "speculative_algorithm": None}
    refuse_server(server(**off, cuda_graph_config=with_prefill("breakable")), uses_mla=False)
    monkeypatch.setenv("SGLANG_RUST_SERVER", str(given.get("SGLANG_RUST_SERVER", 0)))
    with pytest.raises(ValueError, match=message):
        refuse_server(server(**given), given.get("uses_mla", False))


def test_a_model_whose_images_see_later_tokens_is_refused(monkeypatch):
    """Only SGLang's Triton backend shows Gemma 3's images later tokens."""
    models = pytest.importorskip("sglang.srt.models.gemma3_mm")
    model = models.Gemma3ForConditionalGeneration.__new__(models.Gemma3ForConditionalGeneration)
    refuse_model(model, is_multimodal=False)
    refuse_model(object(), is_multimodal=True)
    monkeypatch.setenv("FLEXMASK_SGLANG", "{}")
    runner = SimpleNamespace(server_args=server(decode="torch_native"), device="cpu", model=model)
    runner.model_config, runner.use_mla_backend = SimpleNamespace(hf_config=None, is_multimodal=True), False
    with pytest.raises(ValueError, match=r"--enable-multimodal must be off .* Gemma3ForConditionalGeneration"):
        make_backend(runner)


def test_an_older_release_is_refused_before_anything_of_it_is_read(monkeypatch):
    monkeypatch.setattr(sglang, "__version__", "0.5.21")
    with pytest.raises(ImportError, match=r"got 0\.5\.21, which no release of flexmask has served"):
        make_backend(None)


def test_the_kernel_for_everything_else_is_that_of_decoding():
    assert stock_kernel("fa3", "cuda") == "fa3"
    assert stock_kernel("trtllm_mha", "cuda") == "triton"
    assert stock_kernel("intel_amx", "cpu") == "torch_native"


@pytest.mark.parametrize(
    ("chunk", "tokens", "largest"),
    [
        (8192, 10**6, (8192, 131072)),
        (-1, 10**6, (131072, 131072)),
        (10**6, 10**6, (131072, 131072)),
        (8192, 50000, (8192, 50000)),
        (8192, 5000, (5000, 5000)),
    ],
)
def test_the_largest_call_is_the_last_chunk_of_the_longest_prompt(chunk, tokens, largest):
    runner = SimpleNamespace(model_config=SimpleNamespace(context_len=131072), max_total_num_tokens=tokens)
    assert largest_call(runner, chunk) == largest


def test_the_installed_one_fits_and_changes_are_named(monkeypatch):
    from sglang.srt.layers import radix_attention
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

    assert interface_faults(TorchNativeAttnBackend) == []

    class Other:
        def __init__(self, num_heads, new):
            pass

    monkeypatch.setattr(radix_attention, "RadixAttention", Other)
    names_of = versions.names_of
    monkeypatch.setattr(versions, "names_of", lambda thing: names_of(thing) - {"enable_pdmux"})
    told = "; ".join(interface_faults(Other))
    assert "backend.forward_extend must take q, k, v, layer, forward_batch, save_kv_cache; got none" in told
    assert "backend.init_forward_metadata_out_graph must take forward_batch; got none" in told
    assert "ServerArgs must have enable_pdmux" in told
    assert "RadixAttention must take" in told and "got new, num_heads" in told
