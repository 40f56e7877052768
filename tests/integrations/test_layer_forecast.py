"""`layer_forecast` says what the adapter does, before anything is loaded."""

import pytest
import torch
from transformers import AutoModelForCausalLM, BertConfig, LlamaConfig, LlamaForCausalLM, T5Config

from flexmask.integrations.huggingface.context_manager import opened_scope
from flexmask.integrations.huggingface.layer_forecast import LayerForecast, layer_forecast
from flexmask.integrations.record import PrefillRun
from flexmask.settings import PrefillSettings
from tests.integrations.families import FAMILIES

KEPT = PrefillSettings(block_size=16, min_budget=0, dense_below=150)


def ran(model, tokens, settings):
    """Reasons by layer of a real forward, or what it raised."""
    found = {}

    def note(call):
        found[call.layer] = call.plan().reason or ""
        return torch.zeros(*call.inputs.query.shape[:3], call.inputs.value.shape[3])

    try:
        with opened_scope(model, PrefillRun(settings), note):
            model(torch.ones(1, tokens, dtype=torch.long))
    except NotImplementedError as error:
        return str(error)
    return found


@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if family.available])
def test_the_forecast_is_what_happens(name):
    model = FAMILIES[name].make()
    try:
        expected = ran(model, 300, KEPT)
    except ValueError as error:  # it cannot change its attention in this release
        expected = str(error)
    try:
        forecasts = layer_forecast(model.config, settings=KEPT, tokens=300)
    except NotImplementedError as error:
        forecasts = [LayerForecast(0, "refused", str(error))]
    found = {each.layer: each.reason for each in forecasts if each.outcome in ("sparse", "dense")}
    refused = {each.reason for each in forecasts if each.outcome == "refused"}
    assert (refused == {expected}) if isinstance(expected, str) else (found == expected and not refused)


def test_a_forecast_knows_heads_the_prompts_length_and_saved_settings():
    forecasts = layer_forecast(LlamaConfig(num_hidden_layers=2, num_key_value_heads=8), tokens=20000)
    assert forecasts[1] == (1, "sparse", "", 32, 8, 128, None, "cpu")
    assert layer_forecast(LlamaConfig(num_hidden_layers=2), tokens=2000)[0].reason == "2000 tokens < dense_below 16384"
    saved = LlamaConfig(num_hidden_layers=2, flexmask_config={"dense_layers": [1]})
    before = saved._attn_implementation, saved.to_dict()
    assert [each.outcome for each in layer_forecast(saved)] == ["sparse", "dense"]
    assert (saved._attn_implementation, saved.to_dict()) == before


def test_what_cannot_be_forecast_says_why():
    with pytest.raises(ValueError, match="config must be one that AutoModelForCausalLM makes a model of; got T5Config"):
        layer_forecast(T5Config())
    # the BERT of release 4 has attention of its own
    with pytest.raises(NotImplementedError, match=r"an encoder|must go through transformers' attention interface"):
        layer_forecast(BertConfig(num_hidden_layers=1), tokens=128)
    with pytest.raises(ValueError, match="dense_layers must hold layer indices below 1"):
        layer_forecast(LlamaConfig(num_hidden_layers=1), dense_layers=(4,))
    AutoModelForCausalLM.register(NeedsNumbersConfig, NeedsNumbers, exist_ok=True)
    with pytest.raises(RuntimeError, match="cannot follow NeedsNumbers without weights: "):
        layer_forecast(NeedsNumbersConfig(num_hidden_layers=2))


@pytest.mark.parametrize(("window", "outcome"), [(149, "dense"), (150, "sparse"), (151, "sparse")])
def test_a_window_as_long_as_dense_below_is_sparse(window, outcome):
    config = FAMILIES["Mistral"].make(sliding_window=window).config
    assert {each.outcome for each in layer_forecast(config, settings=KEPT, tokens=300)} == {outcome}


class NeedsNumbersConfig(LlamaConfig):
    model_type = "needs_numbers"


class NeedsNumbers(LlamaForCausalLM):
    """Reads its weights in the forward."""

    config_class = NeedsNumbersConfig

    def forward(self, *arguments, **keywords):
        return (float(self.lm_head.weight.sum()), super().forward(*arguments, **keywords))
