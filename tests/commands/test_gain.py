"""`flexmask gain` on a tiny random model; never the times."""

import re
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("transformers")

from transformers import AutoModelForCausalLM, AutoTokenizer

import flexmask.commands.gain as command
from flexmask import sparse_prefill
from flexmask.commands import gain_model
from flexmask.commands.loading import prompt_ids
from flexmask.integrations.record import PrefillRun
from tests.integrations.common import make_model

SPARSE = ("--dense-below", "0", "--option", "block_size=32", "--min-budget", "0", "--gamma", ".6", "--device", "cpu")


@pytest.mark.attention
def test_a_prompt_gives_times_density_and_error(flexmask, folder, prompt):
    found = flexmask("gain", folder, "--prompt", prompt, *SPARSE, "--json").json
    assert (found["tokens"], found["layers"], found["reasons"]) == (530, {"sparse": 2}, {})
    assert (found["dense"], found["runs"]) == ("sdpa", 3)
    assert found["settings"] == {"method": "hybrid", "gamma": 0.6, "min_budget": 0, "dense_below": 0, "block_size": 32}
    assert min(found["dense_seconds"], found["sparse_seconds"]) > 0
    assert found["ratio"] == found["dense_seconds"] / found["sparse_seconds"]
    assert found["ratios"] == sorted(found["ratios"])
    assert found["gains"] == (found["ratios"][0] >= 1.05)
    # those of a run of its own
    model = AutoModelForCausalLM.from_pretrained(folder)
    ids = prompt_ids(model, AutoTokenizer.from_pretrained(folder), prompt.read_text())

    def log_probs():
        with torch.no_grad():
            return model(ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]

    dense = log_probs()
    with sparse_prefill(model, gamma=0.6, dense_below=0, block_size=32, min_budget=0) as run:
        change = log_probs() - dense
    assert found["density"] == pytest.approx(run.summary().density)
    assert found["density"] < 0.95
    error = found["error"]
    assert error["tokens"] == 529
    assert error["log_prob_change"] == pytest.approx(float(change.abs().mean()), rel=1e-3)
    assert error["log_prob_change"] > 1e-4
    assert error["loss_dense"] == pytest.approx(-float(dense.mean()), rel=1e-4)
    assert error["loss_sparse"] - error["loss_dense"] == pytest.approx(-float(change.mean()), abs=1e-5)


@pytest.mark.parametrize("gives_every_logit", [False, True])
def test_log_probabilities_are_those_of_evenly_spaced_tokens(folder, monkeypatch, gives_every_logit):
    model, ids = AutoModelForCausalLM.from_pretrained(folder), torch.arange(530)[None] * 7 % 96
    forward = model.forward
    if gives_every_logit:
        model.forward = lambda input_ids, use_cache: forward(input_ids=input_ids, use_cache=use_cache)
    monkeypatch.setattr(gain_model, "MAX_SCORED", 300)
    with torch.no_grad():
        every = model(ids, use_cache=False).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
        found = gain_model.log_probs(model, ids)
    torch.testing.assert_close(found, every[torch.linspace(0, 528, 300).round().long()])


@pytest.fixture
def clock(monkeypatch):
    """A clock that prefills advance, by the seconds in the list, in turns: sparse, dense. The first two are foretold.

    The summary of a run takes an hour, which no prefill may be charged with.
    """
    now, seconds = [0.0], []
    monkeypatch.setattr(gain_model, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    prefill, prefills, foretold, summary = gain_model.log_probs, [], [], PrefillRun.summary

    def timed(model, ids):
        now[0] += seconds[len(prefills) % len(seconds)]
        prefills.append(ids)
        return prefill(model, ids)

    def foretell(model, ids):
        foretold.append(ids)
        return seconds[1 if len(foretold) % 2 else 0]

    def summarized(run):
        now[0] += 3600
        return summary(run)

    monkeypatch.setattr(PrefillRun, "summary", summarized)
    monkeypatch.setattr(gain_model, "log_probs", timed)
    monkeypatch.setattr(gain_model, "prefill_seconds", foretell)
    return seconds


@pytest.mark.attention
def test_the_first_round_compiles_and_medians_of_the_others_count(flexmask, folder, prompt, clock):
    clock += [9.0, 1.0, 0.5, 1.5, 1.0, 1.0, 2.0, 2.4]  # of four rounds
    with_json = flexmask("gain", folder, "--prompt", prompt, *SPARSE, "--json")
    found = with_json.json
    assert (found["sparse_seconds"], found["dense_seconds"], found["runs"]) == (1.0, 1.5, 3)
    assert (found["ratio"], found["ratios"]) == (1.5, [1.0, 3.0])
    assert "inconclusive; time to first token improves 1.00x to 3.00x" in found["conclusion"]
    result = flexmask("gain", folder, "--prompt", prompt, *SPARSE)
    assert "To use it" not in result.stdout
    lines = [line.split() for line in result.stdout.splitlines()]
    assert ["dense", "(sdpa)", "100%", "1.5", "s"] in lines
    assert ["hybrid", f"{found['density']:.1%}", "1", "s", "1.50x", "1.00", "to", "3.00"] in lines
    # who reads JSON waits as long
    told, told_too = (re.findall("^prefill .*", each.stderr, re.MULTILINE) for each in (result, with_json))
    assert told == told_too and len(told) == 8


FORETOLD = """timing one layer on 530 tokens
Estimated from one layer: a dense prefill of 530 tokens takes 50 s.
timing one sparse, which compiles first (half a minute or more)
A sparse prefill takes 40 s.
Next: 4 of each in turns, about 6.0 min in all.
"""


@pytest.mark.attention
def test_progress_has_a_line_per_prefill_and_a_gain_ends_with_code_to_paste(flexmask, folder, prompt, clock):
    clock += [40.0, 50.0]
    result = flexmask("gain", folder, "--prompt", prompt, *SPARSE)
    options = "gamma=0.6, min_budget=0, dense_below=0, block_size=32"
    assert f"To use it: with flexmask.sparse_prefill(model, {options}): model.generate(**inputs)" in result.stdout
    said = result.stderr  # no terminal
    assert FORETOLD in said
    lines = [line for line in said.partition(FORETOLD)[2].splitlines() if line.startswith("prefill ")]
    assert (lines[0], lines[-1]) == ("prefill 1 of 8, sparse: 40 s", "prefill 8 of 8, dense: 50 s")
    assert [line.partition("; about ")[2] for line in lines[1::2]] == ["4.5 min to go", "3.0 min to go", "90 s to go", ""]


@pytest.mark.attention
@pytest.mark.parametrize(
    ("seconds", "words", "runs", "said"),
    [
        ((200.0, 150.0), (), 1, "Next: 1 of each in turns, about 5.8 min in all."),
        ((100.0, 120.0), (), 1, "Next: 2 of each in turns, about 7.3 min in all."),
        ((50.0, 50.0), ("--minutes", "5"), 2, "Next: 3 of each in turns, about 5.0 min in all."),
        # the layer deceived
        ((50.0, 50.0, 200.0, 150.0), (), 1, "Slower than planned: the other 2 of 4 rounds are left out."),
    ],
)
def test_rounds_fit_into_the_minutes(flexmask, folder, prompt, clock, seconds, words, runs, said):
    clock += seconds
    result = flexmask("gain", folder, "--prompt", prompt, *SPARSE, *words, "--json")
    assert (result.json["runs"], said in result.stderr.splitlines()) == (runs, True)


@pytest.mark.parametrize(("seconds", "compiles"), [((400.0, 350.0), True), ((100.0, 700.0), False)])
def test_a_prompt_that_takes_longer_is_refused_before_a_prefill(flexmask, folder, prompt, clock, seconds, compiles):
    clock += seconds
    result = flexmask("gain", folder, "--prompt", prompt, *SPARSE, code=1)
    assert "flexmask: a dense and a sparse prefill take more than 10 min here" in result.stderr
    assert ("A sparse prefill takes" in result.stderr) == compiles
    assert "prefill 1 of" not in result.stderr


def test_the_line_to_paste_names_layers_by_number(flexmask, folder, prompt, monkeypatch):
    times = {"tokens": 530, "density": 0.5, "ratio": 2.0, "ratios": [2.0, 2.0], "reasons": {}, "low_heads": None, "error": None}
    names = {"type": "LlamaConfig", "dtype": "float32", "torch": "2", "device": "cpu"}
    monkeypatch.setattr(gain_model, "measure_prompt", lambda *_: {**times, **names})
    result = flexmask("gain", folder, "--prompt", prompt, "--option", 'layers={"1": {"gamma": 0.5}}', "--device", "cpu")
    assert "with flexmask.sparse_prefill(model, layers={1: {'gamma': 0.5}}): model.generate" in result.stdout


def test_a_layer_foretells_a_prefill_and_progress_goes_by_layer(monkeypatch):
    model, now, ran = make_model(num_hidden_layers=3).eval(), [0.0], []
    monkeypatch.setattr(gain_model, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    for number, layer in enumerate(model.model.layers):

        def slow(*_, number=number):
            now[0] += 7.0 if number == 0 else 2.0
            ran.append(number)

        layer.register_forward_pre_hook(slow)
    ids = torch.arange(20)[None]
    with torch.no_grad():
        assert gain_model.prefill_seconds(model, ids) == 6.0  # 3 layers of 2 s: the first also warms up
        assert ran == [0, 1]
        steps = []
        with gain_model.layer_progress(model, 2, lambda *step: steps.append(step)):
            model(ids)
        assert steps == [(1, 6), (2, 6), (3, 6)]
        model(ids)
        assert (ran[2:], len(steps)) == ([0, 1, 2] * 2, 3)  # the hooks are gone
        assert gain_model.prefill_seconds(make_model(num_hidden_layers=1), ids) == 0.0  # the prefill itself


def test_a_short_prompt_gains_nothing_and_is_not_timed(flexmask, folder, prompt):
    found = flexmask("gain", folder, "--prompt", prompt, "--json")
    assert "530 tokens < dense_below 16,384" in found.stderr
    assert found.json["conclusion"] == "530 tokens: nothing to gain; 530 tokens < dense_below 16384"
    assert (found.json["gains"], found.json["error"], found.json["ratio"]) == (False, None, None)


AGAIN = ", depending on the run. Repeat it on a quiet machine"


@pytest.mark.parametrize(
    ("ratio", "ratios", "said"),
    [
        (1.02, (0.7, 1.04), "nothing to gain; the first token comes less than 5% sooner at density 17%"),
        (1.6, (1.06, 2.1), "time to first token improves 1.60x at density 17%"),
        (1.6, (0.9, 2.1), f"inconclusive; time to first token improves 0.90x to 2.10x at density 17%{AGAIN}"),
    ],
)
def test_a_gain_is_one_in_every_run(ratio, ratios, said):
    document = {"tokens": 4096, "density": 0.173, "ratio": ratio, "ratios": ratios}
    assert command.conclusion(document) == f"4,096 tokens: {said}"
