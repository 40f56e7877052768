"""Options of the model "flexmask" of lm-evaluation-harness. `make test-eval` runs them."""

import json

import pytest

pytest.importorskip("lm_eval")

from transformers import AutoModelForCausalLM

from flexmask.integrations.lm_eval import FlexmaskLM
from flexmask.integrations.lm_eval.arguments import split_arguments
from flexmask.settings import PrefillSettings
from tests.integrations.common import MARKS
from tests.integrations.lm_eval_calls import MODEL, make
from tests.integrations.lm_eval_calls import loaded as loaded
from tests.integrations.lm_eval_calls import offline as offline
from tests.repository import ROOT

pytestmark = MARKS


@pytest.mark.parametrize(
    ("name", "value", "close"), [("gama", 0.9, "gamma"), ("metod", "hybrid", "method"), ("dens_below", 0, "dense_below")]
)
def test_refuses_unknown_options_before_the_weights_are_read(name, value, close, monkeypatch, loaded):
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", lambda *args, **kwargs: pytest.fail("read the weights"))
    with pytest.raises(TypeError, match=f"got {name!r}: did you mean .*{close!r}"):
        FlexmaskLM(pretrained=MODEL, device="cpu", **{name: value})
    with pytest.raises(TypeError, match=f"got {name!r}: did you mean .*{close!r}"):
        make(FlexmaskLM, loaded, **{name: value})


def test_fields_of_the_models_config_reach_transformers():
    lm = FlexmaskLM(pretrained=MODEL, device="cpu", dtype="float32", rms_norm_eps=1e-5, attn_implementation="eager")
    assert lm.model.config.rms_norm_eps == 1e-5
    assert lm.model.config._attn_implementation == "eager"


def test_options_go_before_those_of_a_settings_file(tmp_path):
    path = tmp_path / "settings.json"
    path.write_text(json.dumps({"gamma": 0.8, "method": "flexprefill", "layers": {"1": {"tau": 0.2}}, "dense_layers": [0]}))
    chosen, rest = split_arguments({"settings": str(path), "gamma": 0.7, "backend": "causal", "dtype": "float32"})
    expected = PrefillSettings(method="flexprefill", gamma=0.7, layers={1: {"tau": 0.2}}, dense_layers=(0,))
    assert chosen == expected
    assert rest == {"backend": "causal", "dtype": "float32"}
    assert split_arguments({"settings": expected})[0] == expected
    path.write_text(json.dumps({"model_type": "llama", "flexmask_config": {"gamma": 0.8}}))
    assert split_arguments({"settings": path, "backend": "triton"}) == (
        PrefillSettings(gamma=0.8, backend="triton"),
        {},
    )
    assert split_arguments({"dtype": "float32"})[0] is None


def test_refuses_an_option_that_the_layers_of_the_settings_hide():
    with pytest.raises(ValueError, match="gamma must not be given along with settings that hold one for layer 3"):
        split_arguments({"settings": {"layers": {"3": {"gamma": [0.9, 1.0]}}}, "gamma": 0.5})


def test_without_options_the_models_own_hold(loaded):
    saved = json.loads((ROOT / MODEL / "config.json").read_text())["flexmask_config"]
    own = make(FlexmaskLM, loaded).settings
    assert own == PrefillSettings.from_dict(saved)
    assert own.to_dict()["layers"] == saved["layers"]
