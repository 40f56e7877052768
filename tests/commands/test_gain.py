"""`flexmask gain` on a tiny random model; never the times."""

from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")

from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, MixtralConfig

import flexmask.commands.gain as command
from flexmask import sparse_prefill
from flexmask.commands import gain_model, log_probs
from flexmask.commands.gain_model import weights_per_token
from flexmask.commands.gain_times import Times, random_times
from flexmask.commands.loading import prompt_ids
from flexmask.commands.output import Output
from flexmask.settings import PrefillSettings

SPARSE = ("--dense-below", "0", "--option", "block_size=32", "--min-budget", "0", "--device", "cpu")


def check_times(row):
    assert row["dense"]["kernel"] == "SDPA"
    seconds = [row["rest_seconds"], row["dense"]["attention_seconds"]]
    seconds += [way[f"{part}_seconds"] for way in row["sparse"] for part in ("selection", "attention")]
    assert min(seconds) > 0


@pytest.mark.attention
def test_a_config_alone_gives_times_at_the_densities_that_are_given(flexmask, config):
    words = (*SPARSE, "--tokens", "600,300", "--density", "0.3,0.6", "--option", "dense_layers=[1]")
    found = flexmask("gain", config, *words, "--json").json
    assert found["source"] == "random blocks"
    assert [row["tokens"] for row in found["lengths"]] == [600, 300]
    for row in found["lengths"]:
        assert row["layers"] == {"sparse": 2, "dense": 1}
        assert row["reasons"] == {"in dense_layers": 1}
        assert [way["density"] for way in row["sparse"]] == pytest.approx([0.3, 0.6], abs=0.1)
        assert row["timed_share_of_heads"] == 1
        check_times(row)
    assert "error" not in found
    assert found["settings"] == {"method": "hybrid", "min_budget": 0, "dense_below": 0, "block_size": 32, "dense_layers": [1]}
    assert found["weights_per_token"] > 0
    assert found["gains"] == any(way["first_token_ratios"][0] >= 1.05 for row in found["lengths"] for way in row["sparse"])


@pytest.mark.attention
def test_a_prompt_gives_density_and_error(flexmask, folder, prompt):
    found = flexmask("gain", folder, "--prompt", prompt, *SPARSE, "--gamma", ".6", "--new-tokens", "3", "--json").json
    (row,) = found["lengths"]
    assert found["source"] == "prompt"
    assert (row["tokens"], row["layers"], row["reasons"]) == (530, {"sparse": 2}, {})
    check_times(row)
    # those of a run of its own
    model = AutoModelForCausalLM.from_pretrained(folder)
    ids = prompt_ids(model, AutoTokenizer.from_pretrained(folder), prompt.read_text())

    def log_probs():
        with torch.no_grad():
            return model(ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]

    dense = log_probs()
    with sparse_prefill(model, gamma=0.6, dense_below=0, block_size=32, min_budget=0) as run:
        change = log_probs() - dense
        sparse_tokens = model.generate(ids, max_new_tokens=3, do_sample=False)[0, 530:].tolist()
    answers = found["answers"]
    assert answers["dense"]["tokens"] == model.generate(ids, max_new_tokens=3, do_sample=False)[0, 530:].tolist()
    assert answers["sparse"] == {"tokens": sparse_tokens, "text": " ".join(f"w{token}" for token in sparse_tokens)}
    assert row["sparse"][0]["density"] == pytest.approx(run.summary().density)
    assert row["sparse"][0]["density"] < 0.95
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
    monkeypatch.setattr(log_probs, "MOST_SCORED", 300)
    with torch.no_grad():
        every = model(ids, use_cache=False).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
        found = log_probs.log_probs(model, ids)
    torch.testing.assert_close(found, every[torch.linspace(0, 528, 300).round().long()])


@pytest.mark.attention
def test_where_a_cpu_would_need_long_some_layers_are_timed_and_scaled_up(flexmask, folder, prompt, monkeypatch):
    monkeypatch.setattr(gain_model, "_MOST_SECONDS", 0.0)
    waits = []
    monkeypatch.setattr(gain_model, "_remark_wait", lambda *given: waits.append(given[1:4]))
    found = flexmask("gain", folder, "--prompt", prompt, *SPARSE, "--gamma", ".6", "--json")
    (row,) = found.json["lengths"]
    assert row["timed_share_of_layers"] == 0.5 and row["layers"] == {"sparse": 2}
    check_times(row)
    assert "alike layers the first is timed, and seconds are scaled up" in found.stderr
    ((what, seconds, left),) = waits
    assert what == "The first of three prefills" and left == 8 * seconds > 0


def test_timed_calls_stand_for_those_like_them():
    timed = gain_model._Timed(torch.device("cpu"), every=2)
    some, others = Times(1), Times(1)
    some.add(*(torch.full((3,), seconds).numpy() for seconds in (4.0, 1.0, 2.0)))
    others.add(*(torch.full((3,), seconds).numpy() for seconds in (1.0, 0.0, 1.0)))
    timed._kinds = {"some": (some, [4, 2]), "others": (others, [1, 1])}
    whole = timed.times()
    assert (whole.dense[0], whole.selection[0], whole.attention[0, 0], whole.share) == (9.0, 2.0, 5.0, 0.6)


def test_a_long_wait_is_foretold_and_progress_goes_by_layer(folder, capsys):
    output, cpu = Output(), torch.device("cpu")
    gain_model._remark_wait(output, "The first of three prefills", 50.0, 400.0, cpu)
    gain_model._remark_wait(output, "The first of three prefills", 3.0, 24.0, cpu)
    gain_model._remark_wait(output, "The first of three prefills", 200.0, 1600.0, cpu)
    said = capsys.readouterr().err.splitlines()
    assert said[0] == "The first of three prefills took 50 s (the first compiles); the others take about 7 min."
    assert len(said) == 2 and "about 10 min" in said[1]
    model, steps = AutoModelForCausalLM.from_pretrained(folder), []
    with torch.no_grad(), gain_model._by_layer(model, 2, lambda *step: steps.append(step)):
        for _ in range(2):
            model(torch.arange(20)[None])
    total = len(steps)
    assert total >= 4 and steps == [(number, total) for number in range(1, total + 1)]
    model(torch.arange(20)[None])
    assert len(steps) == total  # the hooks are gone


def test_short_lengths_gain_nothing_and_are_not_timed(flexmask, folder, config, prompt):
    result = flexmask("gain", config, "--tokens", "500", "--device", "cpu")
    assert "500 tokens: nothing to gain; 500 tokens < dense_below 16384" in result.stdout
    assert "To use it" not in result.stdout
    found = flexmask("gain", folder, "--prompt", prompt, "--json")
    assert "530 tokens < dense_below 16,384" in found.stderr
    assert found.json["verdict"] == ["530 tokens: nothing to gain; 530 tokens < dense_below 16384"]
    assert (found.json["gains"], found.json["error"], found.json["lengths"][0]["sparse"]) == (False, None, [])


def row_of(*ways):
    """A row of ways: density, the ratio of the first token's times, and its least and largest in a run, by default the same."""
    names = ("density", "first_token_ratio", "first_token_ratios")
    sparse = [dict(zip(names, (*way, [way[1]] * 2)[:3], strict=True)) for way in ways]
    return {"tokens": 4096, "reasons": {}, "sparse": sparse}


@pytest.mark.parametrize(
    ("ratios", "said"),
    [
        ([(0.1, 0.7), (0.4, 1.04)], "nothing to gain; the first token comes less than 5% sooner at density 10% to 40%"),
        ([(0.1, 2.0), (0.2, 1.5), (0.4, 1.0)], "the first token comes 1.50 to 2.00 times as fast at density 10% to 20%"),
        ([(0.173, 1.25)], "the first token comes 1.25 times as fast at density 17%"),
        ([(0.173, 1.6, [1.06, 2.1])], "the first token comes 1.60 times as fast at density 17%"),
        (
            [(0.1, 1.6, [0.9, 2.1]), (0.2, 1.0, [0.9, 1.01])],
            "no verdict; the first token comes 0.90 to 2.10 times as fast at density 10%, from run to run. "
            "Repeat it on a quiet machine",
        ),
    ],
)
def test_verdict_is_nothing_where_the_first_token_comes_hardly_sooner(ratios, said):
    assert command.verdict(row_of(*ratios)) == f"4,096 tokens: {said}"


def test_one_slow_run_gives_no_verdict(capsys):
    times = Times(1)
    times.add([4.0, 4.1, 4.0], [0.5, 2.7, 0.5], [1.5, 1.5, 1.5])
    times.density[:] = 0.2
    row = {"tokens": 4096, "layers": {"sparse": 1}, "reasons": {}} | times.document(rest=1.0)
    (way,) = row["sparse"]
    assert (row["rest_seconds"], row["dense"]["attention_seconds"], row["dense"]["first_token_seconds"]) == (1.0, 4.0, 5.0)
    assert (way["selection_seconds"], way["attention_seconds"], way["first_token_seconds"]) == (0.5, 1.5, 3.0)
    assert (way["attention_ratio"], way["first_token_ratio"]) == pytest.approx((2.0, 5.0 / 3.0))
    assert way["first_token_ratios"] == pytest.approx([5.1 / 5.2, 5.0 / 3.0])
    assert "no verdict; the first token comes 0.98 to 1.67 times as fast" in command.verdict(row)
    about = dict.fromkeys(("model", "type", "dtype", "torch", "device"), "x") | {"settings": {"method": "hybrid"}}
    command._show(Output(), {**about, "source": "prompt", "lengths": [row], "verdict": [], "gains": False})
    assert "0.98 to 1.67" in capsys.readouterr().out


def test_answers_are_compared_up_to_the_first_different_token():
    one, other = {"tokens": [1, 2, 3], "text": "a b c"}, {"tokens": [1, 2, 4, 5], "text": "a b d e"}
    assert command._compared(one, other) == ["dense   'a b c'", "sparse  'a b d e'", "The first 2 of 4 new tokens are equal."]
    assert command._compared(one, {**other, "tokens": [1, 2]})[-1] == "The first 2 of 3 new tokens are equal."
    assert command._compared(one, one)[-1] == "All new tokens are equal."


@pytest.mark.parametrize(
    ("settings", "file", "of_config", "call"),
    [
        ({"method": "hybrid"}, None, False, ""),
        ({"method": "hybrid", "gamma": 0.8}, None, False, ", gamma=0.8"),
        ({"method": "flexprefill"}, None, False, ", method='flexprefill'"),
        ({"method": "hybrid", "layers": {"3": {"gamma": [0.9, 1]}}}, Path("a.json"), False, ", settings='a.json'"),
        ({"method": "hybrid", "gamma": 0.8}, None, True, ""),
    ],
)
def test_a_line_to_paste_switches_it_on(settings, file, of_config, call):
    assert f"with flexmask.sparse_prefill(model{call}): " in command.to_use(settings, file, of_config)


def test_weights_per_token_are_the_matrices_of_the_layers():
    sizes = {"vocab_size": 100, "hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 3}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 4}
    attention, mlp = 8 * 8 * 2 + 2 * 4 * 8, 3 * 8 * 16
    assert weights_per_token(LlamaConfig(**sizes, **heads)) == 3 * (attention + mlp)
    experts = MixtralConfig(**sizes, **heads, num_local_experts=4, num_experts_per_tok=2)
    assert weights_per_token(experts) == 3 * (attention + 2 * mlp + 4 * 8)  # and the router


def test_few_heads_are_timed_where_dense_attention_is_slow():
    settings = PrefillSettings(gamma=[0.5, 0.9, 0.9, 0.9], block_size=32, dense_below=0)
    slow, fast = (random_times((4, 4, 16, None), 64, (), settings, speed, torch.zeros(())) for speed in (1.0, 1e9))
    assert (slow.share, slow.selection.tolist(), len(slow.density)) == (0.25, [0.0] * 3, 0)
    assert fast.share == 1
