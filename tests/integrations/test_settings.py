"""The adapter's settings: by layer, saved with the model, checked."""

import json
import os

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import flexmask.integrations.huggingface as flexmask_hf
from flexmask import METHODS
from flexmask.integrations.huggingface.layer_forecast import layer_forecast
from flexmask.integrations.huggingface.model_config import cached_saved_settings, settings_for
from flexmask.settings import PrefillSettings
from tests.integrations.common import SPARSE, is_untouched


def test_options_are_saved_with_the_model(model, tokens, tmp_path):
    layers = {1: {"gamma": [0.7, 0.5, 0.6, 0.7]}}
    settings = flexmask_hf.configure(model, **SPARSE, layers=layers, dense_layers=[0])
    layers[1]["gamma"][0] = 0.1
    assert settings.layer_method(1).options["gamma"] == (0.7, 0.5, 0.6, 0.7)
    model.save_pretrained(tmp_path)
    flexmask_hf.register()
    loaded = LlamaForCausalLM.from_pretrained(tmp_path, attn_implementation="flexmask")
    assert PrefillSettings.from_dict(loaded.config.flexmask_config) == settings
    assert PrefillSettings.load(tmp_path / "config.json") == settings
    by_name = loaded(tokens).logits
    with flexmask_hf.sparse_prefill(model) as run:  # no options: the model's own
        assert torch.equal(model(tokens).logits, by_name)
    assert run.settings == settings
    assert [calls[0].dense for calls in run.stats.values()] == [True, False]
    assert run.stats[1][0].density.max() < 1


@pytest.mark.parametrize("function", ["configure", "sparse_prefill"])
@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"gamma": torch.tensor([0.5, 1.5])}, ValueError, r"gamma\[1\] must be in"),
        ({"gamma": [0.5] * 3}, ValueError, "layer 0: gamma must hold one number for each of query's 4 heads; got 3"),
        ({"layers": {0: {"gamma": [0.5, float("nan")]}}}, ValueError, r"layers\[0\]: gamma\[1\] must be finite; got nan"),
        ({"settings": PrefillSettings(), "gamma": 0.9}, ValueError, r"settings cannot be combined .* got \['gamma'\]"),
        ({"settings": {"gamma": 0.9}}, TypeError, "settings must be PrefillSettings or a file of them; got dict"),
        ({"tau": 0.1}, TypeError, "method 'hybrid' takes the options .*; got 'tau', an option of flexprefill, published"),
        ({"dense_layers": (2,)}, ValueError, "dense_layers.* below 2.* got 2"),
        ({"dense_layers": 0}, TypeError, "dense_layers must be a tuple.* got int"),
        ({"dense_layers": ("0", 1)}, TypeError, "index in dense_layers must be an int"),
        ({"layers": {7: {"gamma": 0.9}}}, ValueError, "layers.* got 7"),
        ({"layers": {0: {"dense_below": 9}}}, TypeError, r"layers\[0\]: .* got 'dense_below'"),
        ({"layers": [0]}, TypeError, "layers must be a dict; got list"),
        ({"method": "dense"}, ValueError, "method must be one of"),
    ],
)
def test_wrong_options_change_nothing(model, function, options, error, message):
    with pytest.raises(error, match=message), getattr(flexmask_hf, function)(model, **options):
        pytest.fail("entered")
    assert is_untouched(model)


@pytest.mark.parametrize(
    ("saved", "message"),
    [
        ([1], "must be a JSON object of options; got list"),
        ({"layers": [1]}, "layers must be a dict; got list"),
        ({"layers": {"x": {}}}, "layers must have layer indices as keys; got 'x'"),
        ({"layers": {"1": {"gamma": 0.9}, "01": {"gamma": 0.8}}}, "layers must have each layer once; got 1 twice"),
        ({"layers": {"0": 1}}, r"layers\[0\] must be a dict of options; got int"),
        ({"layers": {"7": {}}}, "layers must hold layer indices below 2"),
        ({"gamma": [0.5] * 3}, "layer 0: gamma must hold one number for each of query's 4 heads; got 3 numbers"),
        ({"settings": "/dev/null"}, "got 'settings'"),
        ({"method": None}, "method must be a string; got NoneType"),
        ({"gamma": [[[[[[[[0.5]]]]]]]]}, "at most 8 levels deep"),
        ({"gamma": [0.5] * 2**18}, "must have at most 262,144 values"),
        ({"method": "x" * 300}, "strings of at most 256 characters; got one of 300"),
        ({"gamma": {0.5}}, "must be plain data, as JSON has it; got set"),
    ],
)
def test_settings_in_a_config_are_data_that_errors_name(model, tokens, saved, message):
    model.config.flexmask_config = saved
    with pytest.raises(ValueError, match=f"^flexmask_config: .*{message}"):
        flexmask_hf.sparse_prefill(model)
    flexmask_hf.register()
    model.set_attn_implementation("flexmask")
    with pytest.raises(ValueError, match=f"^flexmask_config: .*{message}"):
        model(tokens)


def test_settings_are_saved_to_a_file(tmp_path):
    path = tmp_path / "settings.json"
    settings = PrefillSettings(gamma=0.8, layers={1: {"gamma": [0.5, 1.0]}})
    settings.save(path)
    assert json.loads(path.read_text()) == {"gamma": 0.8, "layers": {"1": {"gamma": [0.5, 1.0]}}}
    assert PrefillSettings.load(str(path)) == settings
    with pytest.raises(FileNotFoundError):
        PrefillSettings.load(tmp_path / "none.json")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"[1]", "must be a JSON object of options; got list"),
        (b"[" * 10**5, "must be a JSON object in UTF-8"),
        ('{"gamma": 0.9}'.encode("utf-16"), "must be a JSON object in UTF-8"),
        (b" " * (2**24 + 1), "settings must be a file of at most 16,777,216 bytes"),
        ("folder", "settings must be a regular file"),
        ("fifo", "settings must be a regular file"),
        (b'{"layers": {"1": {"gamma": 0.9}, "1": {}}}', "an object must have each key once; got '1' twice"),
        (b'{"flexmask_config": [1]}', "file: flexmask_config: must be a JSON object"),
    ],
    ids=["list", "deep", "encoding", "large", "folder", "fifo", "twice", "config"],
)
def test_other_files_are_refused(tmp_path, content, message):
    path = tmp_path / "file"
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content == "folder":
        path.mkdir()
    else:
        os.mkfifo(path)
    with pytest.raises(ValueError, match=message):
        PrefillSettings.load(path)


@pytest.mark.usefixtures("fresh_process")
def test_settings_of_the_process_go_over_those_of_the_config_and_under_named_ones(model):
    flexmask_hf.configure(model, gamma=0.3, dense_layers=[1], block_size=64)
    options = {"gamma": torch.tensor(0.5), "block_size": 128}
    flexmask_hf.register(**options)
    options["gamma"].fill_(0.9)
    flexmask_hf.register()  # leaves them
    assert settings_for(model.config) == PrefillSettings(gamma=0.5, dense_layers=[1])
    with flexmask_hf.sparse_prefill(model, row_stride=4) as run:
        assert run.settings == PrefillSettings(gamma=0.5, dense_layers=[1], row_stride=4)
    with pytest.raises(ValueError, match="gamma must be in"):
        flexmask_hf.register(gamma=4)
    flexmask_hf.register(settings=PrefillSettings(row_stride=4))  # whole ones
    assert settings_for(model.config) == PrefillSettings(row_stride=4)


def test_settings_of_the_process_are_one_object_for_all_layers(model, fresh_process):
    """Plans are shared by it."""
    for gamma in (0.5, 0.6):
        flexmask_hf.register(gamma=gamma)
        assert settings_for(model.config) is settings_for(model.config)
        assert settings_for(model.config).options["gamma"] == gamma


def test_keywords_override_what_is_saved_one_by_one(model):
    """In a block, in an inspection, in a forecast: only the named keywords change."""
    saved = flexmask_hf.configure(model, **SPARSE, dense_layers=[0], layers={1: {"tau": 0.3}})
    with flexmask_hf.sparse_prefill(model, gamma=0.5) as run:
        assert run.settings == saved.with_fields(gamma=0.5)
        with flexmask_hf.sparse_prefill(model, min_budget=64) as inner:  # not those of the open block
            assert inner.settings == saved.with_fields(min_budget=64)
    assert [each.outcome for each in layer_forecast(model.config, gamma=0.5)] == ["dense", "sparse"]
    with flexmask_hf.sparse_prefill(model, settings=PrefillSettings(gamma=0.5)) as run:
        assert run.settings == PrefillSettings(gamma=0.5)
    assert flexmask_hf.configure(model, gamma=0.5) == PrefillSettings(gamma=0.5)


def test_a_named_option_holds_for_all_layers_and_a_named_method_alone(model):
    saved = {"tau": 0.12, "min_budget": 0, "layers": {1: {"gamma": [0.5] * 4, "tau": 0.2}}, "dense_layers": [0]}
    flexmask_hf.configure(model, "flexprefill", **saved)
    for named, settings in (
        ({"gamma": 0.9}, PrefillSettings("flexprefill", **{**saved, "layers": {1: {"tau": 0.2}}}, gamma=0.9)),
        ({"method": "hybrid"}, PrefillSettings("hybrid", dense_layers=[0])),
    ):
        with flexmask_hf.sparse_prefill(model, **named) as run:
            assert run.settings == settings
        assert len(layer_forecast(model.config, **named)) == 2


def test_settings_print_as_they_are_written():
    settings = PrefillSettings("flexprefill", gamma=[0.5, 1], dense_layers=[3, 1, 1], layers={2: {"tau": 0}})
    written = "PrefillSettings(method='flexprefill', layers={2: {'tau': 0}}, dense_layers=(1, 3), gamma=(0.5, 1))"
    assert repr(settings) == written and eval(written) == settings != PrefillSettings()
    assert settings.with_fields(gamma=0.9, layers={}).to_dict() == {"method": "flexprefill", "dense_layers": [1, 3], "gamma": 0.9}


def test_the_error_for_an_unknown_keyword_lists_all_keywords(model):
    own = ", ".join(METHODS["hybrid"].defaults)
    message = f"method 'hybrid' takes the options {own}; got 'gama'; other keywords: method, "
    with pytest.raises(TypeError, match=f"^{message}.*dense_layers, collect_stats, collect_masks, max_calls, prompt_len$"):
        flexmask_hf.sparse_prefill(model, gama=0.9)


def test_settings_in_a_config_are_parsed_once_and_after_changes():
    config = LlamaConfig(num_hidden_layers=2, num_attention_heads=4)
    config.flexmask_config = {"gamma": [0.5, 0.6, 0.7, 0.8]}
    assert cached_saved_settings(config) is cached_saved_settings(config)
    config.flexmask_config["gamma"][2] = 0.9
    assert cached_saved_settings(config).options["gamma"] == (0.5, 0.6, 0.9, 0.8)
    config.num_attention_heads = 8
    with pytest.raises(ValueError, match="gamma must hold one number for each of query's 8 heads"):
        cached_saved_settings(config)
    config.flexmask_config = {"gamma": 0.9}
    assert cached_saved_settings(config).options == {"gamma": 0.9}
    del config.flexmask_config
    assert cached_saved_settings(config) is None
