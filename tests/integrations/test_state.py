"""State that a block and a mask hold from call to call."""

import copy
import gc
import weakref

import pytest
import torch

pytest.importorskip("transformers")

from flexmask.integrations import huggingface as flexmask_hf
from flexmask.integrations.huggingface import model_config
from flexmask.integrations.huggingface.context_manager import opened
from flexmask.integrations.huggingface.mask import GeometryMask
from flexmask.integrations.huggingface.model_config import settings_for
from flexmask.integrations.record import PrefillRun
from flexmask.settings import PrefillSettings
from tests.integrations.families import FAMILIES
from tests.integrations.support import model_of


def test_a_block_holds_no_module_that_others_have_let_go(without_kernel):
    """torch.nn.DataParallel runs new copies of the modules in each forward."""
    model = model_of("Llama")
    with opened(model, PrefillRun(PrefillSettings(block_size=32, dense_below=0))) as scope:
        model(torch.zeros(1, 100, dtype=torch.long))
        layers = len(scope.methods)
        replica = copy.copy(model.model.layers[0].self_attn)
        scope.methods[replica] = scope.methods[model.model.layers[0].self_attn]
        scope.layer_of(replica)
        gone = weakref.ref(replica)
        del replica
        gc.collect()
        assert gone() is None and len(scope.methods) == layers > 0


def test_a_mask_that_need_not_move_is_the_same_object():
    """Plans are kept by it, and hooks of device_map move it before each layer."""
    for mask in (
        GeometryMask((1, 1, 5, 9), 4),
        GeometryMask((1, 1, 5, 9), torch.tensor([4]), torch.ones(1, 9, dtype=torch.bool)),
    ):
        assert mask.to("cpu") is mask
    moved = mask.to("meta")
    assert moved is not mask and moved.attention_mask.device.type == "meta"


def test_settings_of_the_process_are_one_object_for_all_layers(monkeypatch):
    monkeypatch.setattr(model_config, "_process_override", {})
    config = model_of("Llama").config
    for gamma in (0.5, 0.6):
        flexmask_hf.register(gamma=gamma)
        assert settings_for(config) is settings_for(config) and settings_for(config).options["gamma"] == gamma


def test_options_of_layers_without_attention_are_named(caplog, without_kernel, monkeypatch):
    model = FAMILIES["Llama"].make()
    # as a layer of another kind in a mixture
    monkeypatch.setattr(model.model.layers[0].self_attn, "forward", lambda hidden_states, **_: (hidden_states, None))
    tokens = torch.zeros(1, 100, dtype=torch.long)
    for layers, said in (({0: {"gamma": 0.5}, 1: {"gamma": 0.5}}, 1), ({1: {"gamma": 0.5}}, 0)):
        caplog.clear()
        with flexmask_hf.sparse_prefill(model, block_size=32, dense_below=0, layers=layers):
            model(tokens)
        ignored = [each for each in caplog.messages if "called no attention" in each]
        assert len(ignored) == said and all(each.endswith("layers 0") for each in ignored)
