"""The adapter for transformers, on tiny random models."""

from __future__ import annotations

import subprocess
import sys
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import create_mask

pytest.importorskip("transformers")

from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    DynamicCache,
    Gemma2Config,
    Gemma2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    StaticCache,
)

import flexmask.integrations.huggingface as flexmask_hf
from flexmask import FlexPrefillConfig, flexprefill_mask
from flexmask.integrations.huggingface import flexprefill

# one shape for all that runs compiled: each further one costs a compilation
BATCH, LENGTH = 2, 530
SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "eos_token_id": None,
}
KEEP_ALL: dict[str, Any] = {"gamma": 1.0, "block_size": 32, "min_budget": 0, "dense_below": 0}
SPARSE: dict[str, Any] = {"gamma": 0.6, "tau": 0.3, "block_size": 32, "min_budget": 0, "dense_below": 0}


def make_model(seed=0, model_class=LlamaForCausalLM, config_class=LlamaConfig, **options):
    """A model whose heads attend unevenly: large query and key weights make sharp attention."""
    torch.manual_seed(seed)
    model = model_class(config_class(**{**SIZES, **options})).eval()
    with torch.no_grad():
        for layer in model.model.layers:
            for heads, strength in zip(layer.self_attn.q_proj.weight.split(32), (4.0, 40.0), strict=True):
                heads *= strength
            layer.self_attn.k_proj.weight *= 8
    return model


@pytest.fixture
def model():
    return make_model()


@pytest.fixture
def tokens():
    return torch.randint(SIZES["vocab_size"], (BATCH, LENGTH), generator=torch.Generator().manual_seed(1))


@pytest.fixture(autouse=True)
def no_gradients():
    with torch.no_grad():
        yield


def masked_attention(masks):
    """An attention function of transformers: SDPA under the expanded masks, one per layer."""

    def attention(module, query, key, value, attention_mask, scaling=None, **kwargs):
        mask = masks[module.layer_idx]
        mask = create_mask(mask.mask_mod, *mask.shape, device="cpu")
        out = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scaling, enable_gqa=True)
        return out.transpose(1, 2).contiguous(), None

    return attention


# What it computes


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_equals_sdpa_at_gamma_one(model, tokens, mode):
    expected = model(tokens).logits
    with mode(), flexprefill(model, **KEEP_ALL) as run:
        logits = model(tokens).logits
    assert (logits - expected).abs().max() < 1e-4
    assert [stats.dense for layer in run.stats.values() for stats in layer] == [False, False]


def test_equals_dense_attention_under_its_masks(model, tokens):
    dense = model(tokens).logits
    with flexprefill(model, **SPARSE, collect_masks=True) as run:
        logits = model(tokens).logits
    density = torch.stack([run.stats[layer][0].density for layer in (0, 1)])
    query_aware = torch.stack([run.stats[layer][0].is_query_aware for layer in (0, 1)])
    assert density.mean() < 0.7
    assert query_aware.any()
    assert not query_aware.all()
    assert (logits - dense).abs().max() > 1e-2

    AttentionInterface.register("masked", masked_attention({layer: run.masks[layer][0] for layer in (0, 1)}))
    model.set_attn_implementation("masked")
    assert (model(tokens).logits - logits).abs().max() < 1e-4


def test_selects_on_the_queries_and_keys_of_the_layer(model, tokens):
    seen = {}

    def attention(module, query, key, value, attention_mask, scaling=None, **kwargs):
        seen[module.layer_idx] = (query, key, scaling)
        out = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling, enable_gqa=True)
        return out.transpose(1, 2).contiguous(), None

    AttentionInterface.register("recording", attention)
    model.set_attn_implementation("recording")
    model(tokens)
    options = {name: value for name, value in SPARSE.items() if name != "dense_below"}
    query, key, scale = seen[0]
    mask, stats = flexprefill_mask(query, key, **options, scale=scale, return_stats=True)

    with flexprefill(model, **SPARSE, collect_masks=True) as run:
        model(tokens)
    assert torch.equal(run.masks[0][0].to_dense(), mask.to_dense())
    assert torch.equal(run.stats[0][0].density, stats.density)


def test_generates_as_sdpa_does_at_gamma_one(model, tokens):
    options = {"max_new_tokens": 5, "do_sample": False, "attention_mask": torch.ones_like(tokens)}
    expected = model.generate(tokens, **options)
    with flexprefill(model, **KEEP_ALL) as run:
        assert torch.equal(model.generate(tokens, **options), expected)
        assert torch.equal(model.generate(tokens, **options), expected)
    # a row per prefill, none for the decoding steps
    assert {layer: len(stats) for layer, stats in run.stats.items()} == {0: 2, 1: 2}


def test_later_chunk_sees_the_cache(model, tokens):
    expected = model(tokens).logits
    cache = DynamicCache(config=model.config)
    model(tokens[:, :500], past_key_values=cache)
    with flexprefill(model, dense_below=1 << 20) as run:
        logits = model(tokens[:, 500:], past_key_values=cache).logits
    assert (logits - expected[:, 500:]).abs().max() < 1e-4
    assert run.stats[0][0].dense


def test_short_prompt_runs_dense(model, tokens):
    with flexprefill(model, collect_masks=True) as run:
        model(tokens)
    assert run.stats[1][0].dense
    assert run.masks[1] == [None]


# What it leaves behind


def test_import_registers_nothing():
    code = """
import flexmask.integrations.huggingface as flexmask_hf
from transformers import AttentionInterface, AttentionMaskInterface
names = [{*AttentionInterface().valid_keys()}, {*AttentionMaskInterface().valid_keys()}]
assert not any("flexprefill" in name for both in names for name in both)
flexmask_hf.register()
assert all("flexprefill" in interface().valid_keys() for interface in (AttentionInterface, AttentionMaskInterface))
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False)
    assert run.returncode == 0, run.stderr


@pytest.mark.parametrize("error", [None, KeyError])
def test_is_undone_on_exit(model, tokens, error):
    expected = model(tokens).logits
    with pytest.raises(error) if error else nullcontext(), flexprefill(model, **SPARSE):
        model(tokens)
        assert model.config._attn_implementation == "flexprefill"
        if error:
            raise error
    assert model.config._attn_implementation == "sdpa"
    assert torch.equal(model(tokens).logits, expected)
    assert not any(module in flexmask_hf._RUNS for module in model.modules())


def test_inner_block_gives_back_the_outer_settings(model, tokens):
    with flexprefill(model, **SPARSE) as outer:
        with flexprefill(model, **KEEP_ALL) as inner:
            model(tokens)
        model(tokens)
    assert [len(run.stats[0]) for run in (outer, inner)] == [1, 1]
    assert outer.stats[0][0].density.max() < 1
    assert inner.stats[0][0].density.min() == 1


@pytest.mark.parametrize("shares_config", [False, True])
def test_two_models_do_not_mix(model, tokens, shares_config):
    other = make_model(seed=1)
    if shares_config:
        other = LlamaForCausalLM(model.config).eval()
    expected = model(tokens).logits
    with flexprefill(model, **KEEP_ALL) as run, flexprefill(other, **SPARSE) as other_run:
        other(tokens)
        logits = model(tokens).logits
    assert (logits - expected).abs().max() < 1e-4
    assert run.stats[0][0].density.min() == 1
    assert other_run.stats[0][0].density.max() < 1
    assert [len(each.stats[0]) for each in (run, other_run)] == [1, 1]
    assert model.config._attn_implementation == other.config._attn_implementation == "sdpa"


def test_name_alone_runs_with_the_defaults(model, tokens):
    expected = model(tokens).logits
    flexmask_hf.register()
    model.set_attn_implementation("flexprefill")
    assert (model(tokens).logits - expected).abs().max() < 1e-4


# What it refuses


def padded(tokens):
    mask = torch.ones_like(tokens)
    mask[1, :3] = 0
    return mask


FORWARD_REFUSALS = {
    "padding": lambda model, tokens: {"attention_mask": padded(tokens)},
    "cache": lambda model, tokens: {"past_key_values": StaticCache(config=model.config, max_cache_len=LENGTH + 8)},
    "4-D": lambda model, tokens: {"attention_mask": torch.ones(BATCH, 1, LENGTH, LENGTH, dtype=torch.bool).tril()},
    "packed": lambda model, tokens: {"position_ids": torch.arange(LENGTH)[None] % 265, "use_cache": False},
    "output_attentions": lambda model, tokens: {"output_attentions": True},
    "softcap": lambda model, tokens: {"softcap": 30.0},
}


@pytest.mark.parametrize("what", FORWARD_REFUSALS)
def test_forward_refuses(model, tokens, what):
    with flexprefill(model, **KEEP_ALL), pytest.raises(NotImplementedError, match=f"does not serve .*{what}"):
        model(tokens, **FORWARD_REFUSALS[what](model, tokens))


@pytest.mark.parametrize(
    ("what", "options"),
    [
        ("cache", lambda tokens: {"cache_implementation": "static"}),
        ("padding", lambda tokens: {"attention_mask": padded(tokens)}),
    ],
)
def test_generate_refuses(model, tokens, what, options):
    with flexprefill(model, **KEEP_ALL), pytest.raises(NotImplementedError, match=f"does not serve .*{what}"):
        model.generate(tokens, max_new_tokens=2, pad_token_id=0, **options(tokens))


@pytest.mark.parametrize(
    ("what", "model_class", "config_class", "options"),
    [
        ("sliding", MistralForCausalLM, MistralConfig, {"sliding_window": 64}),
        ("sliding|softcap", Gemma2ForCausalLM, Gemma2Config, {"sliding_window": 4096}),
        ("bidirectional", LlamaForCausalLM, LlamaConfig, {"is_causal": False}),
    ],
)
def test_model_is_refused(tokens, what, model_class, config_class, options):
    other = make_model(0, model_class, config_class, **options)
    with flexprefill(other, **KEEP_ALL), pytest.raises(NotImplementedError, match=what):
        other(tokens)


def test_dropout_is_refused(tokens):
    model = make_model(attention_dropout=0.1).train()
    with flexprefill(model, **KEEP_ALL), pytest.raises(NotImplementedError, match="dropout"):
        model(tokens)


def test_gradients_on_a_cpu_are_refused(model, tokens):
    with flexprefill(model, **KEEP_ALL), torch.enable_grad(), pytest.raises(ValueError, match="no_grad"):
        model(tokens)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"gamma": 1.5}, ValueError, "gamma"),
        ({"config": FlexPrefillConfig(), "gamma": 0.9}, ValueError, "config"),
        ({"config": {"gamma": 0.9}}, TypeError, "config"),
    ],
)
def test_wrong_options_change_nothing(model, arguments, error, message):
    with pytest.raises(error, match=message), flexprefill(model, **arguments):
        pytest.fail("entered")
    assert model.config._attn_implementation == "sdpa"


def test_model_must_be_one():
    with pytest.raises(TypeError, match="PreTrainedModel"), flexprefill(torch.nn.Linear(2, 2)):
        pytest.fail("entered")


def test_old_transformers_is_named(monkeypatch):
    monkeypatch.setattr(flexmask_hf, "sdpa_mask", lambda batch_size, cache_position, kv_length: None)
    with pytest.raises(ImportError, match=r"transformers >= 5\.4"):
        flexmask_hf.register()


def test_mask_interface_is_registered_too():
    flexmask_hf.register()
    # without a mask function transformers would hand over None, padding or not
    assert AttentionMaskInterface()["flexprefill"] is flexmask_hf._mask
