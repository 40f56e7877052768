"""The options of vLLM's plug-in."""

import json
from types import SimpleNamespace

import pytest

from flexmask.dense_policy import DensePolicy
from flexmask.integrations.vllm.engine import serving_options

MODEL = SimpleNamespace(flexmask_config={"gamma": 0.8, "layers": {"2": {"gamma": [0.5, 1.0]}}})


def of(**options):
    return serving_options({"flexmask": options})


def test_settings_and_own_options_stand_side_by_side():
    options = of(
        method="flexprefill", gamma=0.9, block_size=64, dense_below=0, dense_layers=[0], kernel="TRITON_ATTN", count_density=False
    )
    assert (options.settings.method, options.settings.options) == ("flexprefill", {"gamma": 0.9})
    assert (options.settings.dense_layers, options.policy) == ((0,), DensePolicy(0, 64, (0,)))
    assert (options.kernel, options.count_density, options.source) == ("TRITON_ATTN", False, "additional_config")


def test_gammas_by_head_and_layer_come_from_json():
    options = of(**json.loads('{"gamma": [0.9, 1.0], "layers": {"3": {"gamma": [0.5, 0.6]}}}'))
    assert options.settings.selector(0).options["gamma"] == (0.9, 1.0)
    assert options.settings.selector(3).options["gamma"] == (0.5, 0.6)


def test_the_model_s_config_counts_where_nothing_else_is_given():
    for additional in ({}, {"flexmask": {}}, {"flexmask": {"kernel": "FLASH_ATTN"}}, {"other": 1}, object()):
        options = serving_options(additional, MODEL)
        assert (options.settings.options["gamma"], options.source) == (0.8, "the model's config.json")
        assert options.settings.selector(2).options["gamma"] == (0.5, 1.0)
    nested = SimpleNamespace(get_text_config=lambda: MODEL)
    assert serving_options({}, nested).settings.options["gamma"] == 0.8
    assert serving_options({"flexmask": {"gamma": 0.7}}, MODEL).settings.options["gamma"] == 0.7
    assert serving_options({}, SimpleNamespace()).source == "defaults"


def test_a_file_holds_what_tune_saves(tmp_path):
    path = tmp_path / "settings.json"
    path.write_text(json.dumps(of(gamma=0.7, dense_layers=[1]).settings.to_dict()), encoding="utf-8")
    options = of(file=str(path))
    assert (options.settings.options["gamma"], options.settings.dense_layers, options.source) == (0.7, (1,), str(path))
    with pytest.raises(ValueError, match="file must come without settings of its own; got \\['gamma'\\] too"):
        of(file=str(path), gamma=0.9)
    path.write_text("[]", encoding="utf-8")
    with pytest.raises(ValueError, match=r"settings.json: must be a JSON object of options; got list"):
        of(file=str(path))


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (
            {"gama": 0.9},
            ValueError,
            r"\['flexmask'\]: method 'hybrid' takes .* got 'gama'; .* kernel, file, least_rows, count_density, log_every",
        ),
        ({"tau": 0.1}, ValueError, "got 'tau', an option of flexprefill"),
        ({"gamma": 2}, ValueError, "gamma must be in"),
        ({"kernel": "FLASHINFER"}, ValueError, "kernel must be"),
        ({"count_density": 1}, TypeError, "count_density must be true or false; got 1"),
        ({"log_every": 0}, ValueError, "log_every must be > 0 seconds; got 0"),
        ({"file": 3}, TypeError, "file must be a path; got int"),
        ({"layers": {"1": {"tau": 0.1}}}, ValueError, r"layers\[1\]: method 'hybrid' takes"),
        ({"method": "no_such"}, ValueError, "method must be"),
    ],
)
def test_wrong_options_are_refused_by_name(options, error, message):
    with pytest.raises(error, match=message):
        of(**options)


def test_options_must_be_a_dict():
    with pytest.raises(TypeError, match="must be a dict of options; got list"):
        serving_options({"flexmask": [1]})
