"""Generation by the model "flexmask" of lm-evaluation-harness. `make test-eval` runs them."""

from contextlib import nullcontext

import pytest
import torch

pytest.importorskip("lm_eval")

from lm_eval.models.huggingface import HFLM
from transformers import MistralConfig, MistralForCausalLM

from bench.retriever.task import text_of
from flexmask.integrations.lm_eval import FlexmaskLM
from flexmask.integrations.lm_eval.greedy import decode, decodes_greedily
from tests.integrations.common import KEEP_ALL, MARKS
from tests.integrations.lm_eval_calls import LENGTHS, SPARSE, generated, make, prompts
from tests.integrations.lm_eval_calls import loaded as loaded
from tests.integrations.lm_eval_calls import offline as offline

pytestmark = MARKS


def test_generation_does_not_depend_on_the_batch(loaded):
    alone, together = (make(FlexmaskLM, loaded, size, **SPARSE) for size in (1, 8))
    texts = [prompt.text() for prompt in prompts((*LENGTHS, 700 - 5 * 32, 290 + 2 * 32))]
    assert generated(together, texts) == generated(alone, texts)
    assert alone.densities.summary() == together.densities.summary()
    assert together.densities.summary()["density"] < 0.8


def test_greedy_prompts_of_unequal_length_are_decoded_together(loaded, monkeypatch):
    from flexmask.integrations.lm_eval import model

    batches = []

    def recorded(model, prompts, *rest):
        batches.append(len(prompts))
        return decode(model, prompts, *rest)

    decode = model.decode
    monkeypatch.setattr(model, "decode", recorded)
    lm = make(FlexmaskLM, loaded, 8, **SPARSE)
    texts = [prompt.text() for prompt in prompts()]
    generated(lm, texts)
    assert batches == [8]
    generated(lm, texts, do_sample=True, temperature=1.0)
    generated(lm, texts[:2], num_beams=2)
    assert batches == [8]


def test_what_plain_greedy_decoding_does_not_serve(loaded):
    assert decodes_greedily(loaded, {"do_sample": False, "temperature": 0.0})
    for options in (
        {"do_sample": True},
        {"temperature": 0.7},
        {"num_beams": 2},
        {"repetition_penalty": 1.1},
        {"num_return_sequences": 2},
        {"eos_token_id": 5},
        {"max_new_tokens": 3},
    ):
        assert not decodes_greedily(loaded, options)
    config = MistralConfig(
        vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2
    )
    for window, greedily in ((None, True), (16, False)):
        config.sliding_window = window
        assert decodes_greedily(MistralForCausalLM(config), {}) == greedily
    penalized = MistralForCausalLM(config)
    penalized.config.sliding_window = None
    penalized.generation_config.repetition_penalty = 1.2
    assert not decodes_greedily(penalized, {})
    short = MistralForCausalLM(penalized.config)
    assert decodes_greedily(short, {})
    short.generation_config.max_new_tokens = 3
    assert not decodes_greedily(short, {})


def test_stop_strings_and_ends_of_unequal_length_come_out_as_the_harness_has_them(loaded):
    lm, dense = (make(kind, loaded, 8, **options) for kind, options in ((FlexmaskLM, KEEP_ALL), (HFLM, {})))
    drawn = prompts()
    stops = {"until": [text_of(drawn[0].answers[0]).split()[1]], "max_gen_toks": 12}
    texts = [prompt.text() for prompt in drawn]
    found = generated(lm, texts, **stops)
    assert found == generated(dense, texts, **stops)
    assert len({len(text.split()) for text in found}) > 1


@pytest.mark.parametrize("limit", [0, -3])
def test_a_prompt_as_long_as_the_limit_is_refused(loaded, limit):
    with pytest.raises(ValueError, match=f"limit must be at least 1 token; got {limit}"):
        decode(loaded, [torch.tensor([1, 2, 3])], limit, lambda tokens: False, nullcontext())
