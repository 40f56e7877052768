"""Models and calls that the adapter refuses by name, when a block opens or in the forward."""

import pytest
import torch
import transformers

import flexmask.integrations.huggingface as flexmask_hf
from flexmask.integrations.huggingface.attention import attention
from flexmask.integrations.huggingface.mask import GeometryMask
from tests.integrations.common import BATCH, KEEP_ALL, LENGTH, RELEASE, dynamic_cache, is_untouched, make_model
from tests.integrations.families import SIZES

FORWARD_REFUSALS = {
    "4-D": {"attention_mask": torch.ones(BATCH, 1, LENGTH, LENGTH, dtype=torch.bool).tril()},
    **{name: {name: torch.zeros(1, dtype=torch.int64)} for name in ("read_index", "block_indices", "indices", "position_bias")},
    **{name: {name: value} for name, value in (("output_attentions", True), ("prefill_chunk_size", 20))},
}


@pytest.mark.parametrize(
    ("rows", "mask", "message"),
    [
        (40, GeometryMask((1, 1, 40, 40), 0), "40 rows and 41 keys whose mask has 40 rows and 40 keys .the model adds"),
        (40, None, "a prefill without a mask over a cache; use "),
        (1, torch.zeros(1, 1, 1, 41), "a 4-D attention_mask of numbers; use one of booleans"),
    ],
    ids=["other keys", "none", "numbers"],
)
def test_masks_that_do_not_fit_a_call_are_refused(rows, mask, message):
    query, key = torch.zeros(1, 2, rows, 16), torch.zeros(1, 2, 41, 16)
    with pytest.raises(NotImplementedError, match=message):
        attention(torch.nn.Module(), query, key, key, mask)


def test_mask_of_a_decoding_step_may_reach_beyond_the_keys():
    """As a static cache's does where a layer keeps fewer keys."""
    query, key, value = torch.randn(1, 4, 1, 16), torch.randn(1, 2, 40, 16), torch.randn(1, 2, 40, 16)
    mask = torch.arange(60)[None, None, None] > 5
    out, _ = attention(torch.nn.Module(), query, key, value, mask)
    seen = (x[:, :, 6:].repeat_interleave(2, 1) for x in (key, value))
    assert (out.transpose(1, 2) - torch.nn.functional.scaled_dot_product_attention(query, *seen)).abs().max() < 1e-5


@pytest.mark.parametrize("what", FORWARD_REFUSALS)
def test_forward_refuses(model, tokens, what):
    refused = pytest.raises(NotImplementedError, match=f"does not support .*{what}.*; use ")
    with flexmask_hf.sparse_prefill(model, **KEEP_ALL), refused:
        model(tokens, **FORWARD_REFUSALS[what])


def test_bidirectional_attention_is_refused(model, tokens):
    model.model.layers[1].self_attn.is_causal = False  # a model of such layers only is refused on entering
    with pytest.raises(NotImplementedError, match="bidirectional"), flexmask_hf.sparse_prefill(model):
        model(tokens)


def test_mask_of_the_new_tokens_alone_is_refused(model, tokens):
    cache = dynamic_cache(model)
    model(tokens[:, :400], past_key_values=cache)
    mask = torch.ones_like(tokens[:, 400:])
    refused = pytest.raises(ValueError, match=r"attention_mask .*\(2, 530\); got \(2, 130\)")
    with flexmask_hf.sparse_prefill(model, **KEEP_ALL), refused:
        model(tokens[:, 400:], attention_mask=mask, past_key_values=cache)


@pytest.mark.parametrize(
    ("family", "arguments"),
    [
        ("Llama", {"tokenizer": "of stop_strings", "token_type_ids": torch.zeros(1), "special_tokens_mask": torch.zeros(1)}),
        ("Llama", {"length": torch.tensor([530]), "seq_idx": torch.zeros(1, 530), "token_healing": True, "ignore_index": -100}),
        ("Qwen3Moe", {"output_router_logits": True, "num_items_in_batch": torch.tensor(7)}),
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
    with pytest.raises((ValueError, NotImplementedError), match=r"not supported|does not support"):
        model.generate_batch([[1, 2, 3]])


@pytest.mark.parametrize(
    ("kind", "config", "options", "message"),
    [
        # the BERT of release 4 has attention of its own
        ("Model", "Bert", {}, "BertModel, an encoder: every layer's attention is marked as bidirectional|attention interface"),
        ("ForConditionalGeneration", "Bart", {}, "Bart.*, an encoder with a decoder, whose cross attention it does not know"),
        ("ForCausalLM", "Llama4Text", {"num_local_experts": 2}, "Llama4ForCausalLM, a model with chunked attention"),
        ("ForCausalLM", "Llama", {"output_attentions": True}, 'a config with output_attentions; use attn_implementation="eager"'),
    ],
)
def test_model_is_refused_and_left_as_it_was(kind, config, options, message):
    config_of = getattr(transformers, f"{config}Config")
    model_of = getattr(transformers, config.removesuffix("Text") + kind)
    model = model_of(config_of(**SIZES, **options, attn_implementation="eager"))
    with pytest.raises((NotImplementedError, ValueError), match=message) as caught, flexmask_hf.sparse_prefill(model):
        pytest.fail("entered")
    assert (type(caught.value) is NotImplementedError) or "attention interface" in str(caught.value)
    assert "text_config" not in str(caught.value)
    assert is_untouched(model, "eager")
