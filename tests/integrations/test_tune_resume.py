"""`tune(resume=...)`: interrupted, resumed, refused; progress."""

import copy
import json

import pytest
import torch
from transformers.utils import logging

import flexmask.integrations.huggingface as flexmask_hf
from tests.integrations.common import make_model
from tests.integrations.tune_calls import OPTIONS, tuned


def test_it_goes_on_where_it_was_interrupted(model, tokens, tmp_path):
    path, told = tmp_path / "tune.json", []

    def interrupting(*step):
        if step == (3, 4):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tuned(model, tokens, resume=path, progress=interrupting)
    assert json.loads(path.read_text())["complete"] == [True, False]
    result = tuned(model, tokens, resume=str(path), progress=lambda *step: told.append(step))
    assert told == [(3, 4), (4, 4)]
    expected = tuned(model, tokens, progress=lambda *step: told.append(step))
    assert told[2:] == [(done, 4) for done in range(5)]
    # layer 1 of the second prompt follows a layer 0 by another kernel
    assert torch.tensor(result.curve) == pytest.approx(torch.tensor(expected.curve), abs=1e-5)
    again = tuned(model, tokens, resume=path, density=0.7, progress=lambda *step: told.append(step))
    assert told[7:] == [(4, 4)]
    assert again.curve == result.curve
    assert not (tmp_path / "tune.json.part").exists()

    for other, options in [
        ("prompts", {"input_ids": tokens.flip(1)}),
        ("gammas", {"gammas": (0.5, 1.0)}),
        ("options", {"method": "flexprefill"}),
        ("options", {"min_budget": 64}),
        ("model", {"model": make_model(seed=1)}),
        ("model", {"model": with_another_epsilon(model)}),
        ("model", {"model": copy.deepcopy(model).bfloat16()}),
    ]:
        with pytest.raises(ValueError, match=f"resume must be a file of the same .* is of another {other}"):
            flexmask_hf.tune(**{"model": model, "input_ids": tokens, "density": 0.6, "resume": path, **OPTIONS, **options})


def with_another_epsilon(model):
    other = copy.deepcopy(model)
    other.config.rms_norm_eps = 1e-3
    return other


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
