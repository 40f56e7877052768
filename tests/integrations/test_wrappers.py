"""Models in PEFT's wrappers, compiled, in pipelines; what a block leaves in the config."""

import copy
import functools
import json
import pickle

import pytest
import torch
from torch import nn
from transformers import LlamaForCausalLM, Pipeline
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import flexmask.integrations.huggingface as flexmask_hf
from flexmask.settings import PrefillSettings
from tests.integrations.common import SPARSE
from tests.repository import python


class Wrapped(nn.Module):
    """As PEFT's: it calls the forward of the model that it holds, and no hooks."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def get_base_model(self):
        return self.model

    def forward(self, *args, **kwargs):
        return self.model.forward(*args, **kwargs)


def pipe(model):
    made = Pipeline.__new__(type("OnlyAModel", (Pipeline,), dict.fromkeys(Pipeline.__abstractmethods__)))
    made.model = model
    return made


WRAPPERS = {
    "peft": Wrapped,
    "compiled": lambda model: torch.compile(model, backend="eager"),
    "pipeline": pipe,
    "pipeline-peft": lambda model: pipe(Wrapped(model)),
}


@pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS)
def test_wrapper_is_taken_off(model, tokens, wrap):
    wrapped = wrap(model)
    flexmask_hf.configure(wrapped, dense_below=700)
    with flexmask_hf.sparse_prefill(wrapped) as run:
        (model if "OnlyAModel" in type(wrapped).__name__ or hasattr(wrapped, "_orig_mod") else wrapped)(tokens[:, :50])
    assert run.reasons == {0: ["50 tokens < dense_below 700"], 1: ["50 tokens < dense_below 700"]}
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("wrong", [torch.nn.Linear(2, 2), Wrapped(torch.nn.Linear(2, 2)), None, "gpt2"])
def test_an_object_without_a_model_is_refused_by_its_class(wrong):
    with pytest.raises(TypeError, match=r"PreTrainedModel.* got (Linear|Wrapped around Linear|NoneType|str)$"):
        flexmask_hf.sparse_prefill(wrong)


def test_a_model_is_saved_in_a_block_as_outside(model, tmp_path):
    flexmask_hf.configure(model, gamma=0.9)
    with flexmask_hf.sparse_prefill(model, gamma=0.8, dense_layers=(1,)):
        model.save_pretrained(tmp_path)
        assert json.loads((tmp_path / "config.json").read_text())["flexmask_config"] == {"gamma": 0.9}
        with flexmask_hf.sparse_prefill(model) as inner:
            # the model's own, not the outer block's
            assert inner.settings.options == {"gamma": 0.9}
        flexmask_hf.configure(model, gamma=0.7)
    assert model.config.flexmask_config == {"gamma": 0.7}
    loaded = LlamaForCausalLM.from_pretrained(tmp_path)
    assert loaded.config._attn_implementation == "sdpa"
    with flexmask_hf.sparse_prefill(loaded) as run:
        pass
    assert run.settings == PrefillSettings(gamma=0.9)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_copies_made_in_a_block_run_as_outside(model, tokens, attention):
    model.set_attn_implementation(attention)
    tokens, mask = tokens[:, :50], torch.ones(50, 50, dtype=torch.bool).tril()[None, None]
    expected = [model(tokens).logits, model(tokens, attention_mask=mask).logits]
    with flexmask_hf.sparse_prefill(model, **SPARSE) as run:
        copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model)), copy.deepcopy(model)]
        for other in copies[:2]:
            assert torch.equal(other(tokens).logits, expected[0])
        # a mask of the caller's: attention comes first
        assert torch.equal(copies[2](tokens, attention_mask=mask).logits, expected[1])
    assert run.stats == {}
    assert [other.config._attn_implementation for other in copies] == [attention] * 3
    with flexmask_hf.sparse_prefill(copies[0], dense_below=1000) as run:
        copies[0](tokens)
    assert len(run.stats) == 2


def test_a_pickle_made_in_a_block_runs_in_another_process_as_outside(model, tokens, tmp_path):
    expected, folder = model(tokens[:1, :50]).logits, str(tmp_path)
    with flexmask_hf.sparse_prefill(model):
        torch.save(copy.deepcopy(model), tmp_path / "model.pt")
    torch.save(tokens[:1, :50], tmp_path / "tokens.pt")
    python(
        "-c",
        f"""
import torch
torch.set_grad_enabled(False)
model, tokens = (torch.load(f"{folder}/{{name}}.pt", weights_only=False) for name in ("model", "tokens"))
torch.save(model(tokens).logits, "{folder}/logits.pt")
assert model.config._attn_implementation == "sdpa"
""",
    )
    torch.testing.assert_close(torch.load(tmp_path / "logits.pt"), expected)


def test_a_block_overrides_the_settings_of_a_model_by_name(model, tokens):
    flexmask_hf.register()
    flexmask_hf.configure(model, dense_below=700)
    model.set_attn_implementation("flexmask")
    expected = model(tokens).logits
    with flexmask_hf.sparse_prefill(model, dense_below=600) as run:
        model(tokens)
    assert run.reasons[0] == ["530 tokens < dense_below 600"]
    assert model.config._attn_implementation == "flexmask"
    assert torch.equal(model(tokens).logits, expected)


@pytest.mark.usefixtures("fresh_process")
@pytest.mark.parametrize("place", ["attention", "masks"])
def test_other_libraries_wrappers_are_named_and_do_not_run(model, tokens, place):
    """As kvpress's around every function that there is."""
    functions = {"attention": ALL_ATTENTION_FUNCTIONS, "masks": ALL_MASK_ATTENTION_FUNCTIONS}[place]
    with flexmask_hf.sparse_prefill(model) as run:
        expected = model(tokens).logits
    calls = []

    def wrapped(function):
        @functools.wraps(function)
        def wrapper(*args, **kwargs):
            calls.append(function)
            return function(*args, **kwargs)

        return wrapper

    for name, function in functions.items():
        functions[name] = wrapped(function)
    named = pytest.warns(UserWarning, match=r"^tests\.integrations\.test_wrappers wraps attention in transformers")
    with named as caught, flexmask_hf.sparse_prefill(model) as run:
        assert torch.equal(model(tokens).logits, expected)
    assert len(run.stats) == 2
    assert len(caught) == 1
    assert not calls
    model(tokens)
    assert calls
