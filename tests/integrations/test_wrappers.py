"""Models in PEFT's wrappers, compiled, in pipelines; what a block leaves in the config."""

import copy
import json
import pickle

import pytest
import torch
from torch import nn
from transformers import LlamaForCausalLM, Pipeline

import flexmask.integrations.huggingface as flexmask_hf
from flexmask.settings import PrefillSettings
from tests.integrations.common import SPARSE


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
    "compiled-peft": lambda model: torch.compile(Wrapped(model), backend="eager"),
    "pipeline-peft": lambda model: pipe(Wrapped(model)),
}


@pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS)
def test_wrapper_is_taken_off(model, tokens, wrap):
    wrapped = wrap(model)
    flexmask_hf.configure(wrapped, dense_below=700)
    with flexmask_hf.sparse_prefill(wrapped) as run:
        assert model.config._attn_implementation == "flexmask"
        (model if "OnlyAModel" in type(wrapped).__name__ or hasattr(wrapped, "_orig_mod") else wrapped)(tokens[:, :50])
    assert run.reasons == {0: ["50 tokens < dense_below 700"], 1: ["50 tokens < dense_below 700"]}
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("wrong", [torch.nn.Linear(2, 2), Wrapped(torch.nn.Linear(2, 2)), None, "gpt2"])
def test_what_holds_no_model_is_named(wrong):
    with pytest.raises(TypeError, match=r"PreTrainedModel.* got (Linear|Wrapped around Linear|NoneType|str)$"):
        flexmask_hf.sparse_prefill(wrong)


def saved_config(model, folder):
    model.save_pretrained(folder)
    return json.loads((folder / "config.json").read_text()).get("flexmask_config")


def test_options_of_the_block_are_saved_in_it_and_gone_after_it(model, tmp_path):
    with flexmask_hf.sparse_prefill(model, gamma=0.8, dense_layers=(1,)):
        assert saved_config(model, tmp_path / "in") == {"gamma": 0.8, "dense_layers": [1]}
        with flexmask_hf.sparse_prefill(model, gamma=0.7):
            assert saved_config(model, tmp_path / "inner") == {"gamma": 0.7}
        assert saved_config(model, tmp_path / "again") == {"gamma": 0.8, "dense_layers": [1]}
    assert saved_config(model, tmp_path / "after") is None
    loaded = LlamaForCausalLM.from_pretrained(tmp_path / "in")
    assert loaded.config._attn_implementation == "sdpa"
    with flexmask_hf.sparse_prefill(loaded) as run:
        pass
    assert run.settings == PrefillSettings(gamma=0.8, dense_layers=(1,))
    # the model's own stay beside those of blocks
    flexmask_hf.configure(model, gamma=0.9)
    with flexmask_hf.sparse_prefill(model, gamma=0.8), flexmask_hf.sparse_prefill(model) as inner:
        # the model's own, not the outer block's
        assert inner.settings.options == {"gamma": 0.9}
    with flexmask_hf.sparse_prefill(model, method=lambda *args, **options: None):
        assert saved_config(model, tmp_path / "beside") == {"gamma": 0.9}
    assert saved_config(model, tmp_path / "own") == {"gamma": 0.9}


def test_copies_made_in_a_block_have_its_options(model, tokens):
    with flexmask_hf.sparse_prefill(model, **SPARSE) as run:
        expected = model(tokens).logits
        copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
    for other in copies:
        assert torch.equal(other(tokens).logits, expected)  # by its name and its config
    assert len(run.stats[0]) == 1
    with flexmask_hf.sparse_prefill(copies[0], dense_below=1000) as run:
        copies[0](tokens[:, :50])
    assert len(run.stats) == 2
