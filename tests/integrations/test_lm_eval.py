"""The model "flexmask" of lm-evaluation-harness: scores and results. `make test-eval` runs them."""

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

from bench.retriever.task import text_of
from flexmask.integrations.lm_eval import FlexmaskLM
from flexmask.integrations.lm_eval.batches import row_lengths, rows_alike
from flexmask.settings import PrefillSettings
from tests.integrations.common import KEEP_ALL, MARKS
from tests.integrations.lm_eval_calls import LENGTHS, MODEL, SPARSE, answers, generated, make, prompts, same, scored
from tests.integrations.lm_eval_calls import loaded as loaded
from tests.integrations.lm_eval_calls import offline as offline
from tests.repository import ROOT

pytestmark = MARKS


def test_harness_finds_the_model_by_its_name():
    assert get_model("flexmask") is FlexmaskLM
    assert get_model("hf") is HFLM


def test_keeping_everything_scores_as_the_harness_does(loaded):
    lm, dense = (make(kind, loaded, 4, **options) for kind, options in ((FlexmaskLM, KEEP_ALL), (HFLM, {})))
    pairs = answers()
    assert same(scored(lm, pairs), scored(dense, pairs))
    texts = [context for context, _ in pairs]
    assert generated(lm, texts) == generated(dense, texts)
    assert lm.densities.summary()["density"] == 1
    assert lm.densities.summary()["prompts"] == 2 * len(LENGTHS)


def test_scores_do_not_depend_on_the_batch(loaded):
    alone, together = (make(FlexmaskLM, loaded, size, **SPARSE) for size in (1, 8))
    pairs = answers()
    found = scored(together, pairs)
    assert same(found, scored(alone, pairs))
    assert alone.densities.summary() == together.densities.summary()
    assert alone.densities.summary()["density"] < 0.8
    assert not same(found, scored(make(HFLM, loaded, 8), pairs))


def test_equal_tokens_at_the_end_are_the_prompts_own(loaded):
    """None may be taken for padding."""
    texts = [" ".join(text_of(prompt.token_ids[:-40]).split() + ["river"] * 40) for prompt in prompts([600] * 4)]
    pairs = [(text, " river river") for text in texts]
    expected = scored(make(FlexmaskLM, loaded, 1, **SPARSE), pairs)
    assert same(scored(make(FlexmaskLM, loaded, 4, **SPARSE), pairs), expected)


def test_short_prompts_stay_dense_in_a_batch_with_long_ones(loaded):
    options = {**SPARSE, "dense_below": 512}
    alone, together = (make(FlexmaskLM, loaded, size, **options) for size in (1, 8))
    pairs = answers()
    assert same(scored(together, pairs), scored(alone, pairs))
    short = sum(length + 3 < 512 for length in LENGTHS)  # the answer but its last token is read too
    for lm in (alone, together):
        assert lm.densities.summary()["dense_prompts"] == short


def test_rolling_likelihood_by_windows(loaded):
    texts = [prompt.text() for prompt in prompts((700, 290))]
    requests = [Instance("loglikelihood_rolling", {}, (text,), index) for index, text in enumerate(texts)]
    options = {"max_length": 256}
    alone, together, dense = (
        make(kind, loaded, size, **options, **chosen).loglikelihood_rolling(requests, disable_tqdm=True)
        for kind, size, chosen in ((FlexmaskLM, 1, SPARSE), (FlexmaskLM, 4, SPARSE), (HFLM, 1, {}))
    )
    assert torch.allclose(torch.tensor(alone), torch.tensor(together), rtol=1e-4)
    assert not torch.allclose(torch.tensor(alone), torch.tensor(dense), rtol=1e-4)


def test_finds_a_batch_size_of_its_own(loaded):
    lm = make(FlexmaskLM, loaded, "auto", max_batch_size=4, max_length=768, **SPARSE)
    pairs = answers()
    assert same(scored(lm, pairs), scored(make(FlexmaskLM, loaded, 1, **SPARSE), pairs))
    assert list(lm.batch_sizes.values()) == [4]
    assert lm.densities.summary()["prompts"] == len(LENGTHS)  # the trial batches do not count
    assert generated(lm, [pairs[0][0]])


def test_requests_that_share_a_row_are_read_once(loaded):
    context, answer = answers()[0]
    pairs = [(context, answer), (context, " the"), (context, " a"), (context[:1000], " river")]
    alone, together = (make(FlexmaskLM, loaded, size, **SPARSE) for size in (1, 4))
    assert same(scored(together, pairs), scored(alone, pairs))
    assert together.densities.summary()["prompts"] == 3


def test_model_has_its_own_attention_outside_of_calls(loaded):
    lm = make(FlexmaskLM, loaded, **SPARSE)
    before = loaded.config._attn_implementation
    scored(lm, answers()[:1])
    assert loaded.config._attn_implementation == before != "flexmask"


def test_results_tell_version_options_and_density():
    results = simple_evaluate(
        model="flexmask",
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
    assert PrefillSettings.from_dict(told["options"]) == PrefillSettings(**SPARSE)
    assert {bucket: each["prompts"] for bucket, each in told["by_tokens"].items()} == {"<=512": 6, "<=1024": 6}
    assert 0.1 < told["density"] < 0.8
    for task, metric in (("retriever_needles", "exact_match,none"), ("retriever_needles_likelihood", "acc,none")):
        assert results["results"][task][metric] > 0.5


def test_warns_where_every_prompt_ran_dense(loaded, caplog):
    lm = make(FlexmaskLM, loaded, gamma=0.6)
    scored(lm, answers()[:2])
    with caplog.at_level(logging.WARNING, logger="flexmask"):
        told = lm.get_model_info()["flexmask"]
    assert "all 2 prompts ran dense" in caplog.text and "dense_below 16384" in caplog.text
    assert (told["density"], told["dense_prompts"]) == (1, 2)


def test_chat_template_goes_before_the_prompt(loaded):
    lm = make(FlexmaskLM, loaded, **SPARSE)
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
        make(FlexmaskLM, T5ForConditionalGeneration(T5Config(**sizes)))


def test_refuses_batches_in_another_order(loaded, monkeypatch):
    monkeypatch.setattr("flexmask.integrations.lm_eval.model.row_lengths", lambda *args: [9, 9, 9])
    with pytest.raises(RuntimeError, match="batches in another order than"):
        scored(make(FlexmaskLM, loaded, **SPARSE), answers()[:1])


def test_lengths_of_rows():
    requests = [(None, [1, 2, 3], [4, 5]), (None, [1, 2, 3, 4], [6]), (None, [1], [2]), (None, [7] * 9, [8, 8])]
    assert row_lengths(requests, 8, merges=True) == [8, 4, 1]
    assert row_lengths(requests, 8, merges=False) == [8, 4, 4, 1]


def test_rows_that_keep_their_blocks_run_together():
    settings = PrefillSettings(block_size=64, dense_below=100)
    lengths = [300, 90, 300 - 64, 300 - 32, 70, 300]
    assert rows_alike(lengths, settings, padded_left=False) == [[0, 2, 3, 5], [1, 4]]
    assert rows_alike(lengths, settings, padded_left=True) == [[0, 2, 5], [1, 4], [3]]
    assert rows_alike(lengths, settings, padded_left=False, on_cpu=True) == [[0], [1, 4], [2], [3], [5]]
    assert rows_alike([5, 6], PrefillSettings(), padded_left=True, on_cpu=True) == [[0, 1]]
