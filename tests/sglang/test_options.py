"""The options of SGLang's plug-in."""

import json
from types import SimpleNamespace

import pytest

from flexmask.dense_policy import DensePolicy
from flexmask.integrations.sglang.options import VARIABLE, serving_options

MODEL = SimpleNamespace(flexmask_config={"gamma": 0.8})


@pytest.fixture
def of(monkeypatch):
    def read(text, model=None):
        monkeypatch.setenv(VARIABLE, text if isinstance(text, str) else json.dumps(text))
        return serving_options("triton", model)

    return read


def test_settings_and_own_options_stand_side_by_side(of):
    options = of({"method": "flexprefill", "gamma": 0.9, "block_size": 64, "dense_below": 0, "kernel": "fa3", "log_every": 5})
    assert (options.settings.method, options.settings.options) == ("flexprefill", {"gamma": 0.9})
    assert (options.kernel, options.log_every, options.source) == ("fa3", 5, VARIABLE)
    assert options.policy == DensePolicy(0, 64)
    assert of({"gamma": 0.9}).kernel == "triton"


def test_the_variable_may_name_a_file(of, tmp_path):
    path = tmp_path / "options.json"
    path.write_text('{"gamma": 0.7, "count_density": false}', encoding="utf-8")
    options = of(str(path))
    assert (options.settings.options["gamma"], options.count_density) == (0.7, False)


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ({"gama": 0.9}, ValueError, "FLEXMASK_SGLANG: method 'hybrid' takes .* got 'gama'; .* kernel, file, least_rows"),
        ({"gamma": 2}, ValueError, "gamma must be in"),
        ({"kernel": "FLASH_ATTN"}, ValueError, "kernel must be"),
        ({"count_density": 1}, TypeError, "count_density must be true or false; got 1"),
        ([1], TypeError, "FLEXMASK_SGLANG must be a dict of options; got list"),
        ("{gamma: 1}", ValueError, "FLEXMASK_SGLANG must be a JSON object or the path of a file with one: Expecting"),
        ("/no/such/file", ValueError, "the path of a file with one; got '/no/such/file'"),
    ],
)
def test_wrong_options_are_refused_by_name(of, text, error, message):
    with pytest.raises(error, match=message):
        of(text)
