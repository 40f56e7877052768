"""Models that cannot be served are refused when a block opens, and left as they were."""

from typing import Any

import pytest
import torch
import transformers

import flexmask.integrations.huggingface as flexmask_hf
from flexmask.integrations.huggingface.session import SWITCHED, Session
from tests.integrations.common import make_model
from tests.integrations.families import VOCABULARY

SIZES: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
WHISPER: dict[str, Any] = {
    **{f"{part}_{what}": 1 for part in ("encoder", "decoder") for what in ("layers", "attention_heads", "ffn_dim")},
    **{"d_model": 16, "num_mel_bins": 4, "vocab_size": VOCABULARY, "max_source_positions": 8, "max_target_positions": 8},
    **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1},
}


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
        lambda: transformers.WhisperForConditionalGeneration(transformers.WhisperConfig(**WHISPER)),
        "WhisperForConditionalGeneration, an encoder with a decoder, whose cross attention it does not know; use",
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


def test_dropout_is_not_refused_before_the_forward(tokens):
    """The model may go to evaluation later."""
    model = make_model(attention_dropout=0.1).train()
    with flexmask_hf.sparse_prefill(model), torch.no_grad():
        model.eval()(tokens[:, :50])
