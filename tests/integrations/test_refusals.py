"""Models and calls that the adapter refuses by name, when a block opens or in the forward."""

from typing import Any

import pytest
import torch
import transformers

import flexmask.integrations.huggingface as flexmask_hf
from flexmask.integrations.huggingface.attention import attention
from flexmask.integrations.huggingface.mask import PrefillMask
from flexmask.integrations.huggingface.session import SWITCHED, Session
from tests.integrations.common import BATCH, KEEP_ALL, LENGTH, RELEASE, dynamic_cache, make_model
from tests.integrations.families import VOCABULARY

FORWARD_REFUSALS = {
    "4-D": {"attention_mask": torch.ones(BATCH, 1, LENGTH, LENGTH, dtype=torch.bool).tril()},
    **{name: {name: torch.zeros(1, dtype=torch.int64)} for name in ("read_index", "block_indices", "indices", "position_bias")},
    **{name: {name: value} for name, value in (("output_attentions", True), ("prefill_chunk_size", 20))},
}


def test_mask_for_other_keys_names_both():
    query, key = torch.zeros(1, 2, 40, 16), torch.zeros(1, 2, 41, 16)
    with pytest.raises(NotImplementedError, match=r"40 rows and 41 keys under a mask of 40 and 40 \(keys that the model adds"):
        attention(torch.nn.Module(), query, key, key, PrefillMask((1, 1, 40, 40), 0))


def test_mask_of_a_decoding_step_may_reach_beyond_the_keys():
    """As a static cache's does where a layer keeps fewer keys."""
    query, key, value = torch.randn(1, 4, 1, 16), torch.randn(1, 2, 40, 16), torch.randn(1, 2, 40, 16)
    mask = torch.arange(60)[None, None, None] > 5
    out, _ = attention(torch.nn.Module(), query, key, value, mask)
    seen = (x[:, :, 6:].repeat_interleave(2, 1) for x in (key, value))
    assert (out.transpose(1, 2) - torch.nn.functional.scaled_dot_product_attention(query, *seen)).abs().max() < 1e-5


@pytest.mark.parametrize("what", FORWARD_REFUSALS)
def test_forward_refuses(model, tokens, what):
    refused = pytest.raises(NotImplementedError, match=f"does not serve .*{what}.*; use ")
    with flexmask_hf.sparse_prefill(model, **KEEP_ALL), refused:
        model(tokens, **FORWARD_REFUSALS[what])


def test_bidirectional_attention_is_refused(tokens):
    model = make_model()
    model.model.layers[1].self_attn.is_causal = False  # a model of such layers only is refused on entering
    with pytest.raises(NotImplementedError, match="bidirectional"), flexmask_hf.sparse_prefill(model):
        model(tokens)


def test_mask_of_the_new_tokens_alone_is_refused(model, tokens):
    cache = dynamic_cache(model)
    model(tokens[:, :400], past_key_values=cache)
    mask = torch.ones_like(tokens[:, 400:])
    with (
        flexmask_hf.sparse_prefill(model, **KEEP_ALL),
        pytest.raises(ValueError, match=r"attention_mask .*\(2, 530\); got \(2, 130\)"),
    ):
        model(tokens[:, 400:], attention_mask=mask, past_key_values=cache)


@pytest.mark.parametrize(
    ("family", "arguments"),
    [
        ("Llama", {"num_items_in_batch": torch.tensor(7)}),
        ("Llama", {"tokenizer": "of stop_strings", "token_type_ids": torch.zeros(1), "special_tokens_mask": torch.zeros(1)}),
        ("Llama", {"length": torch.tensor([530]), "seq_idx": torch.zeros(1, 530), "token_healing": True, "ignore_index": -100}),
        ("Qwen3Moe", {"output_router_logits": True}),
    ],
)
def test_arguments_that_do_not_change_attention_are_served(tokens, family, arguments):
    model = make_model(family)
    expected = model(tokens, **arguments).logits
    with flexmask_hf.sparse_prefill(model):
        assert (model(tokens, **arguments).logits - expected).abs().max() < 1e-4


def test_dropout_is_refused_in_the_forward(tokens):
    model = make_model(attention_dropout=0.1).train()
    with flexmask_hf.sparse_prefill(model):
        with pytest.raises(NotImplementedError, match="dropout"):
            model(tokens)
        model.eval()(tokens[:, :50])


def test_continuous_batching_is_refused(model, tokens):
    flexmask_hf.register()
    model.set_attn_implementation("flexmask")
    if RELEASE < (5, 0):  # its thread dies before attention on a CPU
        assert model.generate_batch([[1, 2, 3]]) == {}
        return
    with pytest.raises((ValueError, NotImplementedError), match=r"not supported|does not serve"):
        model.generate_batch([[1, 2, 3]])


SIZES: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}


def bert(**options):
    return transformers.BertModel(transformers.BertConfig(vocab_size=VOCABULARY, **SIZES, **options))


def llama4():
    config = transformers.Llama4TextConfig(
        vocab_size=VOCABULARY, **SIZES, num_key_value_heads=2, head_dim=16, num_local_experts=2, intermediate_size_mlp=32
    )
    return transformers.Llama4ForCausalLM(config)


MODELS = {
    "encoder": (bert, "BertModel, an encoder: every layer's attention is marked as bidirectional; use", "attention interface"),
    "encoder and decoder": (
        lambda: transformers.BartForConditionalGeneration(
            transformers.BartConfig(vocab_size=VOCABULARY, d_model=16, encoder_layers=1, decoder_layers=1)
        ),
        "BartForConditionalGeneration, an encoder with a decoder, whose cross attention it does not know; use",
        "",
    ),
    "chunked": (llama4, "Llama4ForCausalLM, a model with chunked attention", ""),
    "attention weights": (
        lambda: make_model(attn_implementation="eager", output_attentions=True),
        'LlamaForCausalLM, a config with output_attentions; use attn_implementation="eager"',
        "",
    ),
}


@pytest.mark.parametrize("make", MODELS)
def test_model_is_refused_and_left_as_it_was(make):
    build, message, before_5 = MODELS[make]
    model = build()
    former = model.config._attn_implementation
    errors = (NotImplementedError, ValueError) if before_5 else NotImplementedError
    with (
        pytest.raises(errors, match=f"{message}|{before_5}" if before_5 else message) as caught,
        flexmask_hf.sparse_prefill(model),
    ):
        pytest.fail("entered")
    assert "text_config" not in str(caught.value)
    assert model.config._attn_implementation == former
    assert not Session.of(model).scopes
    assert not SWITCHED
    assert not model.base_model._forward_hooks
