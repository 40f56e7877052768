"""The model "flexprefill" of lm-evaluation-harness: options, scores that do not depend on the batch, what the results tell.

`make test-eval` runs them; without the harness they are skipped.
"""

from __future__ import annotations

import json
import logging

import pytest
import torch

pytest.importorskip("lm_eval")

from lm_eval.api.instance import Instance
from lm_eval.api.registry import get_model
from lm_eval.evaluator import simple_evaluate
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from transformers import AutoModelForCausalLM, MistralConfig, MistralForCausalLM

from bench.retriever.task import make_prompt, text_of
from flexmask.integrations.lm_eval import FlexPrefillLM
from flexmask.integrations.lm_eval.arguments import split_arguments
from flexmask.integrations.lm_eval.batches import row_lengths, rows_alike
from flexmask.integrations.lm_eval.greedy import decodes_greedily
from flexmask.integrations.settings import PrefillSettings
from tests.integrations.common import KEEP_ALL, MARKS
from tests.repository import ROOT

pytestmark = MARKS

MODEL = str(ROOT / "bench" / "retriever" / "model")
SPARSE = {"gamma": 0.6, "selection": "hybrid", "block_size": 32, "min_budget": 0, "dense_below": 0}
LENGTHS = (700, 683, 640, 512, 510, 333, 330, 290)


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


@pytest.fixture(scope="module")
def loaded():
    return AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()


def make(kind, loaded, batch_size=1, **options):
    return kind(pretrained=loaded, tokenizer=MODEL, batch_size=batch_size, device="cpu", **options)


def prompts(lengths=LENGTHS):
    return [make_prompt(length, 8, 1, seed) for seed, length in enumerate(lengths)]


def scored(lm, pairs):
    """Log-likelihoods of (context, continuation)."""
    requests = [Instance("loglikelihood", {}, pair, index) for index, pair in enumerate(pairs)]
    return [score for score, _ in lm.loglikelihood(requests, disable_tqdm=True)]


def answers(lengths=LENGTHS):
    """Each prompt with the answer of the next: the model is sure of a right one under any mask, and a wrong one's score moves."""
    drawn = prompts(lengths)
    return [(each.text(), " " + text_of(other.answers[0])) for each, other in zip(drawn, drawn[1:] + drawn[:1], strict=True)]


def generated(lm, texts, **options):
    options = {"until": [], "max_gen_toks": 6, "do_sample": False, **options}
    requests = [Instance("generate_until", {}, (text, options), index) for index, text in enumerate(texts)]
    return lm.generate_until(requests, disable_tqdm=True)


def same(found, expected):
    return torch.allclose(torch.tensor(found), torch.tensor(expected), rtol=0, atol=2e-3)


def test_harness_finds_the_model_by_its_name():
    assert get_model("flexprefill") is FlexPrefillLM
    assert get_model("hf") is HFLM


@pytest.mark.parametrize(
    ("name", "value", "close"), [("gama", 0.9, "gamma"), ("selektion", "hybrid", "selection"), ("dens_below", 0, "dense_below")]
)
def test_refuses_unknown_options_before_the_weights_are_read(name, value, close, monkeypatch, loaded):
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", lambda *args, **kwargs: pytest.fail("read the weights"))
    with pytest.raises(TypeError, match=f"got {name!r}: did you mean .*{close!r}"):
        FlexPrefillLM(pretrained=MODEL, device="cpu", **{name: value})
    with pytest.raises(TypeError, match=f"got {name!r}: did you mean .*{close!r}"):
        make(FlexPrefillLM, loaded, **{name: value})


def test_fields_of_the_models_config_reach_transformers():
    lm = FlexPrefillLM(pretrained=MODEL, device="cpu", dtype="float32", rms_norm_eps=1e-5, attn_implementation="eager")
    assert lm.model.config.rms_norm_eps == 1e-5
    assert lm.model.config._attn_implementation == "eager"


@pytest.mark.parametrize("wrong", [{"gamma": 2.0}, {"selection": "best"}, {"dense_layers": [7]}, {"dense_below": -1}])
def test_refuses_values_out_of_range(loaded, wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        make(FlexPrefillLM, loaded, **wrong)


def test_options_go_before_those_of_a_settings_file(tmp_path):
    path = tmp_path / "settings.json"
    path.write_text(json.dumps({"gamma": 0.8, "selection": "hybrid", "layers": {"1": {"tau": 0.2}}, "dense_layers": [0]}))
    chosen, rest = split_arguments({"settings": str(path), "gamma": 0.7, "backend": "causal", "dtype": "float32"})
    expected = PrefillSettings.from_options(gamma=0.7, selection="hybrid", layers={1: {"tau": 0.2}}, dense_layers=(0,))
    assert chosen == expected
    assert rest == {"backend": "causal", "dtype": "float32"}
    assert split_arguments({"settings": expected})[0] == expected
    path.write_text(json.dumps({"model_type": "llama", "flexprefill_config": {"gamma": 0.8}}))
    assert split_arguments({"settings": path, "backend": "triton"}) == (
        PrefillSettings.from_options(gamma=0.8, backend="triton"),
        {},
    )
    assert split_arguments({"dtype": "float32"})[0] is None


def test_refuses_an_option_that_the_layers_of_the_settings_hide():
    with pytest.raises(ValueError, match="gamma must not be given along with settings that hold one for layer 3"):
        split_arguments({"settings": {"layers": {"3": {"gamma": [0.9, 1.0]}}}, "gamma": 0.5})


@pytest.mark.parametrize(
    ("text", "message"), [("{", "must be a JSON object"), ("[1]", "must be a JSON object"), ('{"gama": 1}', "gama")]
)
def test_refuses_what_is_no_settings_file(tmp_path, text, message):
    path = tmp_path / "settings.json"
    path.write_text(text)
    with pytest.raises((TypeError, ValueError), match=message):
        split_arguments({"settings": str(path)})


def test_without_options_the_models_own_hold(loaded):
    saved = json.loads((ROOT / MODEL / "config.json").read_text())["flexprefill_config"]
    assert make(FlexPrefillLM, loaded).settings.to_dict() == saved


def test_keeping_everything_scores_as_the_harness_does(loaded):
    lm, dense = (make(kind, loaded, 4, **options) for kind, options in ((FlexPrefillLM, KEEP_ALL), (HFLM, {})))
    pairs = answers()
    assert same(scored(lm, pairs), scored(dense, pairs))
    texts = [context for context, _ in pairs]
    assert generated(lm, texts) == generated(dense, texts)
    assert lm.densities.summary()["density"] == 1
    assert lm.densities.summary()["prompts"] == 2 * len(LENGTHS)


def test_scores_do_not_depend_on_the_batch(loaded):
    alone, together = (make(FlexPrefillLM, loaded, size, **SPARSE) for size in (1, 8))
    pairs = answers()
    found = scored(together, pairs)
    assert same(found, scored(alone, pairs))
    assert alone.densities.summary() == together.densities.summary()
    assert alone.densities.summary()["density"] < 0.8
    assert not same(found, scored(make(HFLM, loaded, 8), pairs))


def test_without_the_mask_scores_would_depend_on_the_batch(loaded, monkeypatch):
    pairs = answers()
    expected = scored(make(FlexPrefillLM, loaded, 1, **SPARSE), pairs)

    def forgetful(self, inps, lengths):
        with torch.no_grad(), self._sparse(lengths):
            return self.model(inps).logits

    monkeypatch.setattr(FlexPrefillLM, "_masked_logits", forgetful)
    assert not same(scored(make(FlexPrefillLM, loaded, 8, **SPARSE), pairs), expected)


def test_equal_tokens_at_the_end_are_the_prompts_own(loaded, monkeypatch):
    """Prompts of one length need no padding, so none of their tokens may be taken for it."""
    texts = [" ".join(text_of(prompt.token_ids[:-40]).split() + ["river"] * 40) for prompt in prompts([600] * 4)]
    pairs = [(text, " river river") for text in texts]
    expected = scored(make(FlexPrefillLM, loaded, 1, **SPARSE), pairs)
    assert same(scored(make(FlexPrefillLM, loaded, 4, **SPARSE), pairs), expected)
    never = property(lambda run: False, lambda run, value: None)
    monkeypatch.setattr("flexmask.integrations.run.FlexPrefillRun.padding_is_masked", never)
    assert not same(scored(make(FlexPrefillLM, loaded, 4, **SPARSE), pairs), expected)


def test_short_prompts_stay_dense_in_a_batch_with_long_ones(loaded):
    options = {**SPARSE, "dense_below": 512}
    alone, together = (make(FlexPrefillLM, loaded, size, **options) for size in (1, 8))
    pairs = answers()
    assert same(scored(together, pairs), scored(alone, pairs))
    short = sum(length + 3 < 512 for length in LENGTHS)  # the answer but its last token is read too
    for lm in (alone, together):
        assert lm.densities.summary()["dense_prompts"] == short


def test_generation_does_not_depend_on_the_batch(loaded):
    alone, together = (make(FlexPrefillLM, loaded, size, **SPARSE) for size in (1, 8))
    texts = [prompt.text() for prompt in prompts((*LENGTHS, 700 - 5 * 32, 290 + 2 * 32))]
    assert generated(together, texts) == generated(alone, texts)
    assert alone.densities.summary() == together.densities.summary()
    assert together.densities.summary()["density"] < 0.8


def test_generation_of_a_padded_batch_would_keep_other_blocks(loaded, monkeypatch):
    texts = [prompt.text() for prompt in prompts()]
    alone, together = (make(FlexPrefillLM, loaded, size, **SPARSE) for size in (1, 8))
    generated(alone, texts)
    monkeypatch.setattr("flexmask.integrations.lm_eval.model.decodes_greedily", lambda *_: False)
    monkeypatch.setattr("flexmask.integrations.lm_eval.model.rows_alike", lambda lengths, *_, **__: [list(range(len(lengths)))])
    generated(together, texts)
    assert alone.densities.summary() != together.densities.summary()


def test_greedy_prompts_of_unequal_length_are_decoded_together(loaded, monkeypatch):
    from flexmask.integrations.lm_eval import model

    batches = []

    def recorded(model, prompts, *rest):
        batches.append(len(prompts))
        return decode(model, prompts, *rest)

    decode = model.decode
    monkeypatch.setattr(model, "decode", recorded)
    lm = make(FlexPrefillLM, loaded, 8, **SPARSE)
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
    lm, dense = (make(kind, loaded, 8, **options) for kind, options in ((FlexPrefillLM, KEEP_ALL), (HFLM, {})))
    drawn = prompts()
    stops = {"until": [text_of(drawn[0].answers[0]).split()[1]], "max_gen_toks": 12}
    texts = [prompt.text() for prompt in drawn]
    found = generated(lm, texts, **stops)
    assert found == generated(dense, texts, **stops)
    assert len({len(text.split()) for text in found}) > 1


def test_rolling_likelihood_by_windows(loaded):
    texts = [prompt.text() for prompt in prompts((700, 290))]
    requests = [Instance("loglikelihood_rolling", {}, (text,), index) for index, text in enumerate(texts)]
    options = {"max_length": 256}
    alone, together, dense = (
        make(kind, loaded, size, **options, **chosen).loglikelihood_rolling(requests, disable_tqdm=True)
        for kind, size, chosen in ((FlexPrefillLM, 1, SPARSE), (FlexPrefillLM, 4, SPARSE), (HFLM, 1, {}))
    )
    assert torch.allclose(torch.tensor(alone), torch.tensor(together), rtol=1e-4)
    assert not torch.allclose(torch.tensor(alone), torch.tensor(dense), rtol=1e-4)


def test_finds_a_batch_size_of_its_own(loaded):
    lm = make(FlexPrefillLM, loaded, "auto", max_batch_size=4, max_length=768, **SPARSE)
    pairs = answers()
    assert same(scored(lm, pairs), scored(make(FlexPrefillLM, loaded, 1, **SPARSE), pairs))
    assert list(lm.batch_sizes.values()) == [4]
    assert lm.densities.summary()["prompts"] == len(LENGTHS)  # the trial batches do not count
    assert generated(lm, [pairs[0][0]])


def test_requests_that_share_a_row_are_read_once(loaded):
    context, answer = answers()[0]
    pairs = [(context, answer), (context, " the"), (context, " a"), (context[:1000], " river")]
    alone, together = (make(FlexPrefillLM, loaded, size, **SPARSE) for size in (1, 4))
    assert same(scored(together, pairs), scored(alone, pairs))
    assert together.densities.summary()["prompts"] == 3


def test_model_has_its_own_attention_outside_of_calls(loaded):
    lm = make(FlexPrefillLM, loaded, **SPARSE)
    before = loaded.config._attn_implementation
    scored(lm, answers()[:1])
    assert loaded.config._attn_implementation == before != "flexprefill"


def test_results_tell_version_options_and_density():
    results = simple_evaluate(
        model="flexprefill",
        model_args={"pretrained": MODEL, "dtype": "float32", **SPARSE},
        tasks=["retriever_needles", "retriever_needles_likelihood"],
        task_manager=TaskManager(
            include_path=str(ROOT / "bench" / "tasks"),
            metadata={"max_seq_lengths": [512, 700], "num_samples": 3, "num_needles": 8},
        ),
        batch_size=4,
        device="cpu",
        bootstrap_iters=0,
    )
    import flexmask

    told = json.loads(json.dumps(results["config"]["flexmask"]))
    assert told["version"] == flexmask.__version__
    assert PrefillSettings.from_dict(told["options"]) == PrefillSettings.from_options(**SPARSE)
    assert {bucket: each["prompts"] for bucket, each in told["by_tokens"].items()} == {"<=512": 6, "<=1024": 6}
    assert 0.1 < told["density"] < 0.8
    for task, metric in (("retriever_needles", "exact_match,none"), ("retriever_needles_likelihood", "acc,none")):
        assert results["results"][task][metric] > 0.5


def test_warns_where_every_prompt_ran_dense(loaded, caplog):
    lm = make(FlexPrefillLM, loaded, gamma=0.6)
    scored(lm, answers()[:2])
    with caplog.at_level(logging.WARNING, logger="flexmask"):
        told = lm.get_model_info()["flexmask"]
    assert "all 2 prompts ran dense" in caplog.text and "dense_below 16384" in caplog.text
    assert (told["density"], told["dense_prompts"]) == (1, 2)


def test_chat_template_goes_before_the_prompt(loaded):
    lm = make(FlexPrefillLM, loaded, **SPARSE)
    lm.tokenizer.chat_template = "{% for m in messages %}<bos> {{ m['content'] }}{% endfor %}"
    assert lm.apply_chat_template([{"role": "user", "content": "the river"}]) == "<bos> the river"
    results = simple_evaluate(
        model=lm,
        tasks=["retriever_needles"],
        task_manager=TaskManager(
            include_path=str(ROOT / "bench" / "tasks"), metadata={"max_seq_lengths": [512], "num_samples": 1, "num_needles": 8}
        ),
        apply_chat_template=True,
        bootstrap_iters=0,
    )
    (sample,) = results["samples"]["retriever_needles"]
    assert sample["arguments"][0][0].startswith("<bos> <bos>")
    assert lm.densities.summary()["prompts"] == 1


def test_refuses_an_encoder_with_a_decoder():
    from transformers import T5Config, T5ForConditionalGeneration

    sizes = {"vocab_size": 5400, "d_model": 32, "d_kv": 16, "d_ff": 32, "num_layers": 1, "num_heads": 2}
    with pytest.raises(NotImplementedError, match="an encoder with a decoder"):
        make(FlexPrefillLM, T5ForConditionalGeneration(T5Config(**sizes)))


def test_refuses_batches_in_another_order(loaded, monkeypatch):
    monkeypatch.setattr("flexmask.integrations.lm_eval.model.row_lengths", lambda *args: [9, 9, 9])
    with pytest.raises(RuntimeError, match="batches in another order than"):
        scored(make(FlexPrefillLM, loaded, **SPARSE), answers()[:1])


def test_lengths_of_rows():
    requests = [(None, [1, 2, 3], [4, 5]), (None, [1, 2, 3, 4], [6]), (None, [1], [2]), (None, [7] * 9, [8, 8])]
    assert row_lengths(requests, 8, merges=True) == [8, 4, 1]
    assert row_lengths(requests, 8, merges=False) == [8, 4, 4, 1]


def test_rows_that_keep_their_blocks_run_together():
    settings = PrefillSettings.from_options(block_size=32, dense_below=100, layers={0: {"block_size": 64}})
    lengths = [300, 90, 300 - 64, 300 - 32, 70, 300]
    assert rows_alike(lengths, settings, padded_left=False) == [[0, 2, 3, 5], [1, 4]]
    assert rows_alike(lengths, settings, padded_left=True) == [[0, 2, 5], [1, 4], [3]]
    assert rows_alike(lengths, settings, padded_left=False, on_cpu=True) == [[0], [1, 4], [2], [3], [5]]
    assert rows_alike([5, 6], PrefillSettings(), padded_left=True, on_cpu=True) == [[0, 1]]
