"""Models that commands read, and `flexmask inspect` on a tiny model."""

import json
import re
from unittest.mock import Mock

import pytest

pytest.importorskip("transformers")
pytest.importorskip("matplotlib")

from flexmask import commands


@pytest.mark.parametrize("words", ["doctor", "gain", "inspect --prompt {} --out x"])
def test_the_model_may_be_an_argument_or_an_option(flexmask, prompt, words):
    for given in ("nowhere/at/all", "--model nowhere/at/all"):
        said = flexmask(*f"{words} {given}".format(prompt).split(), code=2).stderr
        assert "no folder nowhere/at/all" in said


def test_a_mistyped_name_asks_the_hub_once(flexmask, monkeypatch):
    huggingface_hub = pytest.importorskip("huggingface_hub")
    metadata = Mock(side_effect=OSError("no such repository"))
    monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", metadata)
    result = flexmask("gain", "no-such-model-anywhere", code=commands.PROBLEM)
    assert result.stderr == "flexmask: cannot load no-such-model-anywhere: no folder here, and on the hub: no such repository\n"
    assert metadata.call_count == 1 and metadata.call_args.kwargs["timeout"] <= 10


def test_a_broken_model_is_one_line(flexmask, folder, prompt, tmp_path):
    for path in folder.iterdir():
        if path.suffix != ".safetensors":
            (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / "model.safetensors").write_bytes(b"nothing of the kind")
    result = flexmask("gain", "--model", tmp_path, "--prompt", prompt, code=commands.PROBLEM)
    loading, error = result.stderr.splitlines()
    assert (loading, error.startswith(f"flexmask: cannot load {tmp_path}: ")) == (f"loading {tmp_path}", True)


def test_a_settings_file_holds_gammas_by_layer_and_head(flexmask, folder, tmp_path):
    path = tmp_path / "settings.json"
    path.write_text('{"layers": {"0": {"gamma": [0.5, 0.9, 1, 1]}, "1": {"gamma": [1, 1, 1, 1]}}}')
    plan = flexmask("doctor", folder, "--skip-self-test", "--settings", path, "--device", "cpu", "--json").json
    assert [each["plan"] for each in plan["layers"]] == ["sparse", "dense"]


SPARSE = ("--dense-below", 0, "--option", "block_size=32")


def test_short_prompt_runs_dense_and_says_so(flexmask, folder, prompt, tmp_path):
    out = tmp_path / "report"
    result = flexmask("inspect", "--model", folder, "--prompt", prompt, "--out", out)
    said = result.stdout
    assert "530 tokens < dense_below" in said
    assert "530 tokens < dense_below 16,384: the prompt runs dense" in result.stderr.partition("report:")[0]
    assert f"report: {out / 'report.html'}" in said
    assert {path.name for path in out.iterdir()} == {"report.html", "inspection.json"}


@pytest.mark.attention
def test_json_is_what_is_written(flexmask, folder, prompt, tmp_path):
    out = tmp_path / "report"
    options = [*SPARSE, "--method", "flexprefill", "--gamma", 0.6, "--min-budget", 0, "--option", "tau=0.12"]
    where = ["--model", folder, "--prompt", prompt, "--out", out]
    found = json.loads(flexmask("inspect", *where, *options, "--layers", "0-1", "--heads", "1", "--json").stdout)
    assert found["report"] == str(out / "report.html")
    written = json.loads((out / "inspection.json").read_text(encoding="utf-8"))
    assert {name: value for name, value in found.items() if name != "report"} == written
    expected = {"method": "flexprefill", "gamma": 0.6, "block_size": 32, "min_budget": 0, "tau": 0.12, "dense_below": 0}
    assert written["settings"] == expected
    assert len(written["held_by_quarter"]) == 4
    assert [(each["layer"], each["head"]) for each in written["shown"]] == [(0, 1), (1, 1)]


@pytest.mark.attention
def test_attention_held_by_position_is_shown_with_its_warning(flexmask, folder, prompt, tmp_path):
    options = [*SPARSE, "--method", "streaming_llm", "--option", "sink_blocks=1", "--option", "window_blocks=1"]
    shown = flexmask("inspect", "--model", folder, "--prompt", prompt, "--out", tmp_path / "out", *options).stdout
    quarters = re.search(r"attention held by quarter of the prompt, mean over layers and heads: (.*)", shown)[1].split(", ")
    assert len(quarters) == 4
    assert all(0 < float(share.removesuffix("%")) <= 100 for share in quarters)
    assert f"warning: The mask holds {quarters[3]} of the attention of the prompt's last quarter" in shown
