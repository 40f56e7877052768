"""`tune`: settings, targets, padding, refusals; interrupted and resumed."""

import copy
import functools
import gc
import json

import numpy as np
import pytest
import torch
from transformers.utils import logging

import flexmask.integrations.huggingface as flexmask_hf
from tests.integrations.common import GAMMAS, TUNE, is_untouched, make_model, tuned


@pytest.mark.attention
@pytest.mark.parametrize("method", ["hybrid", "flexprefill"])
def test_the_settings_keep_what_was_predicted(model, prompt, method):
    whole = tuned(model, prompt, density=1.0, method=method, dense_below=0, gammas=(0.2, 0.5, 0.7, 0.9, 0.95, 1.0))
    target = (whole.curve[0][0] + whole.curve[-1][0]) / 2
    result = whole.at(density=target)
    one_step = max(a[0] - b[0] for a, b in zip(result.curve, result.curve[1:], strict=False))
    assert target - one_step <= result.density <= target < 0.8
    gammas = {row["gamma"] for row in result.rows()}
    assert len(gammas) > 1
    with flexmask_hf.sparse_prefill(model, settings=result.settings) as run:
        model(prompt)
    kept = torch.stack([run.stats[layer][0].density[0] for layer in (0, 1)])
    predicted = torch.tensor([row["density"] for row in result.rows()]).view(2, 4)
    assert torch.equal(kept[0], predicted[0])
    assert kept[1] == pytest.approx(predicted[1], abs=0.1)
    assert float(kept.mean()) == pytest.approx(result.density, abs=0.02)


def test_errors_are_of_a_dense_prefill(model, prompt):
    """Layer 1 is measured under the inputs that a dense layer 0 gives."""
    result = tuned(model, prompt)
    with_dense = tuned(model, prompt, dense_layers=(0,), density=1.0)
    assert with_dense.dense == {0: "in dense_layers"}
    assert [row["layer"] for row in with_dense.rows()] == [1] * 4
    former = [each.error for each in (result._measured.by_prompt[0][1], with_dense._measured.by_prompt[0][1])]
    assert torch.tensor(former[0]) == pytest.approx(torch.tensor(former[1]), rel=1e-3, abs=1e-7)
    assert 0 not in with_dense.settings.layers


def test_the_result_adds_up(model, prompt):
    result = tuned(model, prompt, density=0.7)
    rows = result.rows()
    assert [(row["layer"], row["head"]) for row in rows] == [(layer, head) for layer in (0, 1) for head in range(4)]
    assert sum(row["density"] for row in rows) / 8 == pytest.approx(result.density)
    assert sum(row["error"] for row in rows) / 8 == pytest.approx(result.error)
    for layer in (0, 1):
        assert result.settings.layers[layer]["gamma"] == tuple(row["gamma"] for row in rows if row["layer"] == layer)
    assert result.settings.method == "hybrid"
    assert result.curve[0] == (pytest.approx(1.0), 0.0)
    assert (result.density, result.error) in result.curve
    # no gamma for all heads is below the curve
    _, densities, errors = np.array(result.uniform).T
    assert (np.interp(densities, *np.array(result.curve[::-1]).T) <= errors + 1e-9).all()
    assert result.uniform[-1] == (1.0, pytest.approx(1.0), 0.0)
    every = result.rows(every_gamma=True)
    assert len(every) == len(rows) * len(GAMMAS)
    assert all(row in every for row in rows)


def test_a_target_error_is_met(model, prompt):
    result = tuned(model, prompt, error=0.1)
    assert 0 < result.error <= 0.1
    following = result.curve[result.curve.index((result.density, result.error)) + 1]
    assert following[1] > 0.1
    assert result.at(density=result.density).settings == result.settings
    assert result.at(error=0).error == 0


def test_prompts_are_averaged(model, tokens):
    first, second = (tuned(model, row) for row in tokens)
    both = tuned(model, [tokens[0], tokens[1:]])
    for one, other, mean in zip(first.uniform, second.uniform, both.uniform, strict=True):
        assert mean == pytest.approx([(a + b) / 2 for a, b in zip(one, other, strict=True)])
    assert tuned(model, tokens).uniform == both.uniform


def test_a_window_below_the_break_even_stays_dense(prompt):
    model = make_model("Gemma3")
    result = tuned(model, prompt)
    assert result.dense == {0: "sliding window 200 < dense_below 16384"}
    assert set(result.settings.layers) == {1}
    every = tuned(model, prompt, density=0.8, dense_below=0)
    assert every.dense == {}
    assert set(every.settings.layers) == {0, 1}
    # its heads see fewer blocks and weigh less
    layers = every._measured.by_prompt[0].values()
    assert len({errors.visible for errors in layers}) == 2
    for at, (_, density, _) in enumerate(every.uniform):
        kept = sum(errors.visible * head[at] for errors in layers for head in errors.density)
        assert density == pytest.approx(kept / sum(4 * errors.visible for errors in layers))
    for row in every.rows(every_gamma=True):
        errors = every._measured.by_prompt[0][row["layer"]]
        assert row["density"] == pytest.approx(errors.density[row["head"]][GAMMAS.index(row["gamma"])])


def test_a_model_that_calls_attention_twice_or_is_spread_over_processes_is_refused(model, prompt):
    model.model.layers[1].self_attn.register_forward_hook(
        lambda module, args, kwargs, out: module.forward(*args, **kwargs), with_kwargs=True
    )
    with pytest.raises(NotImplementedError, match="calls attention more than once in layer 1"):
        tuned(model, prompt)
    assert model.config._attn_implementation == "sdpa"
    model.model.layers[0].mlp.up_proj.weight.device_mesh = "of a DTensor"
    with pytest.raises(NotImplementedError, match="tune does not serve a model spread over processes"):
        tuned(model, prompt)


def test_half_precision_and_open_blocks(model, prompt):
    exact = tuned(model, prompt)
    with flexmask_hf.sparse_prefill(model, gamma=0.5, dense_below=0) as run:
        assert tuned(model, prompt).curve == exact.curve
        assert not run.stats
    half = tuned(model.bfloat16(), prompt)
    for (_, *one), (_, *other) in zip(half.uniform, exact.uniform, strict=True):
        assert one == pytest.approx(other, abs=0.05)


def test_the_model_is_left_as_it_was(model, prompt):
    before = dict(model.config.to_dict())
    tuned(model, prompt)
    assert model.config.to_dict() == before
    assert model.config._attn_implementation == "sdpa"
    with torch.no_grad():
        model.model.layers[1].self_attn.v_proj.weight[0, 0] = float("nan")
    with pytest.raises(ValueError, match="model must give finite attention; got NaN or infinity in layer 1"):
        tuned(model, prompt)
    assert is_untouched(model)


def test_layers_are_let_go_of_one_by_one(model, prompt):
    held = []

    def count(done, of):
        gc.collect()
        like_queries = [each for each in gc.get_objects() if type(each) is torch.Tensor and each.shape == (1, 4, 530, 16)]
        held.append(len(like_queries))

    tuned(model, prompt, progress=count)
    assert held[0] == 0 < held[1] == held[2]


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"density": None}, ValueError, "density or error must be given, and not both"),
        ({"density": 0.0}, ValueError, r"density must be in \(0, 1\]; got 0.0"),
        ({"density": "half"}, TypeError, "density must be a number"),
        ({"density": None, "error": -1}, ValueError, "error must be >= 0; got -1"),
        ({"density": None, "error": float("nan")}, ValueError, "error must be finite"),
        ({"density": 0.01}, ValueError, "density must be at least 0.*, that of the lowest gammas in every head; got 0.01"),
        ({"density": None, "error": 1e-9, "gammas": (0.3, 0.5)}, ValueError, "error must be at least .*; got 1e-09"),
        ({"gammas": ()}, TypeError, "gammas must be a sequence of numbers, at least one"),
        ({"gradient": "loss"}, TypeError, "gradient must be True or False; got 'loss'"),
        ({"gammas": (0.5, 1.5)}, ValueError, r"gammas\[1\] must be in \(0, 1\]; got 1.5"),
        ({"gammas": (0.5, "a")}, TypeError, r"gammas\[1\] must be a number"),
        ({"method": "causal"}, ValueError, "method must be .*hybrid.*; got 'causal'"),
        ({"selection": "hybrid"}, TypeError, "takes the options .*; got 'selection'"),
        ({"gamma": 0.9}, TypeError, "options must be without gamma, which tune finds"),
        ({"layers": {0: {"gamma": 0.9}}}, TypeError, "options must be without layers"),
        ({"dense_layers": (0, 1)}, ValueError, "model must have a layer to tune; got LlamaForCausalLM: in dense_layers"),
        ({"model": torch.nn.Linear(2, 2)}, TypeError, "model must be a transformers PreTrainedModel"),
        ({"input_ids": [[1, 2]]}, TypeError, "input_ids must be a tensor"),
        ({"input_ids": torch.zeros(1, 40)}, ValueError, "input_ids must be .* integer"),
        ({"input_ids": torch.ones(1, 16, dtype=torch.int64)}, ValueError, r"more than block_size \(16\) tokens a prompt; got 16"),
        ({"input_ids": torch.ones(0, 64, dtype=torch.int64)}, ValueError, "input_ids must hold a prompt"),
        ({"attention_mask": torch.ones(1, 530)}, TypeError, "takes the options .*; got 'attention_mask'"),
    ],
)
def test_wrong_arguments_are_refused(model, prompt, options, error, message):
    arguments = {"model": model, "input_ids": prompt, "density": 0.5, **TUNE, **options}
    with pytest.raises(error, match=message):
        flexmask_hf.tune(**arguments)
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("gradient", [False, True], ids=["errors", "by the loss"])
def test_it_goes_on_where_it_was_interrupted(model, tokens, tmp_path, gradient):
    path, told = tmp_path / "tune.json", []
    run = functools.partial(tuned, model, tokens, gradient=gradient)

    def interrupting(*step):
        if step == (3, 4):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(resume=path, progress=interrupting)
    assert json.loads(path.read_text())["complete"] == [True, False]
    result = run(resume=str(path), progress=lambda *step: told.append(step))
    assert told == [(3, 4), (4, 4)]
    expected = run(progress=lambda *step: told.append(step))
    assert told[2:] == [(done, 4) for done in range(5)]
    # layer 1 of the second prompt follows a layer 0 by another kernel
    assert torch.tensor(result.curve) == pytest.approx(torch.tensor(expected.curve), abs=1e-5)
    again = run(resume=path, density=0.7, progress=lambda *step: told.append(step))
    assert told[7:] == [(4, 4)]
    assert again.curve == result.curve
    assert not (tmp_path / "tune.json.part").exists()

    epsilon = copy.deepcopy(model)
    epsilon.config.rms_norm_eps = 1e-3
    for other, options in [
        ("prompts", {"tokens": tokens.flip(1)}),
        ("gammas", {"gammas": (0.5, 1.0)}),
        ("options", {"method": "flexprefill"}),
        ("options", {"min_budget": 64}),
        ("errors", {"gradient": not gradient}),
        ("model", {"model": make_model(seed=1)}),
        ("model", {"model": epsilon}),
        ("model", {"model": copy.deepcopy(model).bfloat16()}),
    ]:
        with pytest.raises(ValueError, match=f"resume must be a file of the same .* is of another {other}"):
            tuned(**{"model": model, "tokens": tokens, "resume": path, "gradient": gradient, **options})


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": "flexmask tune 1"}', "no JSON"])
def test_another_file_is_not_overwritten(model, tokens, tmp_path, text):
    path = tmp_path / "notes.json"
    path.write_text(text)
    with pytest.raises(ValueError, match="resume must be a file that tune wrote, or none yet"):
        tuned(model, tokens[:1], resume=path)
    assert path.read_text() == text


def test_the_bar_shows_without_a_terminal(model, tokens, capsys):
    logging.enable_progress_bar()  # which commands switch off
    tuned(model, tokens[:1], density=1.0, gammas=(0.5, 1.0), progress=True)
    assert "tune: layers" in capsys.readouterr().err
    tuned(model, tokens[:1], density=1.0, gammas=(0.5, 1.0), progress=False)
    assert capsys.readouterr().err == ""
