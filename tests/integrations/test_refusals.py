"""Models and calls that the adapter refuses by name."""

import pytest
import torch

import flexmask.integrations.huggingface as flexmask_hf
from flexmask.integrations.huggingface.attention import attention
from flexmask.integrations.huggingface.mask import PrefillMask
from tests.integrations.cells import RELEASE, dynamic_cache
from tests.integrations.common import BATCH, KEEP_ALL, LENGTH, make_model

FORWARD_REFUSALS = {
    "4-D": lambda model, tokens: {"attention_mask": torch.ones(BATCH, 1, LENGTH, LENGTH, dtype=torch.bool).tril()},
    "read_index": lambda model, tokens: {"read_index": [torch.arange(LENGTH)]},
    "block_indices": lambda model, tokens: {"block_indices": torch.zeros(1, dtype=torch.int64)},
    "indices": lambda model, tokens: {"indices": torch.zeros(1, dtype=torch.int64)},
    "output_attentions": lambda model, tokens: {"output_attentions": True},
    "position_bias": lambda model, tokens: {"position_bias": torch.zeros(1)},
}


@pytest.mark.parametrize("lengths", [(LENGTH - 100, 100), (1, LENGTH - 1), (LENGTH - 1, 1)], ids=str)
def test_packed_prompts_are_refused_under_a_mask_without_padding(model, tokens, lengths):
    # after a sequence of one token the positions are 0 and 0
    position_ids = torch.cat([torch.arange(length) for length in lengths])[None]
    with (
        flexmask_hf.sparse_prefill(model, **KEEP_ALL),
        pytest.raises(NotImplementedError, match=r"packed sequences \(position_ids"),
    ):
        model(tokens, position_ids=position_ids, attention_mask=torch.ones_like(tokens))


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
        model(tokens, **FORWARD_REFUSALS[what](model, tokens))


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


def test_dropout_is_refused(tokens):
    model = make_model(attention_dropout=0.1).train()
    with flexmask_hf.sparse_prefill(model, **KEEP_ALL), pytest.raises(NotImplementedError, match="dropout"):
        model(tokens)


def test_continuous_batching_is_refused(model, tokens):
    flexmask_hf.register()
    model.set_attn_implementation("flexmask")
    if RELEASE < (5, 0):  # its thread dies before attention on a CPU
        assert model.generate_batch([[1, 2, 3]]) == {}
        return
    with pytest.raises((ValueError, NotImplementedError), match=r"not supported|does not serve"):
        model.generate_batch([[1, 2, 3]])
