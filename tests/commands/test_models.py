"""Models that commands read, and `flexmask inspect` on a tiny model."""

from unittest.mock import Mock

import pytest

pytest.importorskip("transformers")
pytest.importorskip("matplotlib")

from flexmask import commands


@pytest.mark.parametrize("words", ["doctor", "gain --prompt {}", "inspect --prompt {} --out x"])
def test_a_folder_that_is_not_there_is_refused(flexmask, prompt, words):
    said = flexmask(*f"{words} nowhere/at/all".format(prompt).split(), code=2).stderr
    assert "'MODEL': no folder nowhere/at/all" in said


def test_a_mistyped_name_asks_the_hub_once(flexmask, prompt, monkeypatch):
    huggingface_hub = pytest.importorskip("huggingface_hub")
    metadata = Mock(side_effect=OSError("no such repository"))
    monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", metadata)
    result = flexmask("gain", "no-such-model-anywhere", "--prompt", prompt, code=commands.PROBLEM)
    *_, said = result.stderr.splitlines(keepends=True)
    assert said == "flexmask: cannot load no-such-model-anywhere: no folder here, and on the hub: no such repository\n"
    assert metadata.call_count == 1 and metadata.call_args.kwargs["timeout"] <= 10


def test_a_broken_model_is_one_line(flexmask, folder, prompt, tmp_path):
    for path in folder.iterdir():
        if path.suffix != ".safetensors":
            (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / "model.safetensors").write_bytes(b"nothing of the kind")
    result = flexmask("gain", tmp_path, "--prompt", prompt, code=commands.PROBLEM)
    loading, error = result.stderr.splitlines()
    assert (loading, error.startswith(f"flexmask: cannot load {tmp_path}: ")) == (f"loading {tmp_path}", True)


def test_a_settings_file_holds_gammas_by_layer_and_head(flexmask, folder, tmp_path):
    path = tmp_path / "settings.json"
    path.write_text('{"layers": {"0": {"gamma": [0.5, 0.9, 1, 1]}, "1": {"gamma": [1, 1, 1, 1]}}}')
    report = flexmask("doctor", folder, "--skip-self-test", "--settings", path, "--device", "cpu", "--json").json
    assert [each["outcome"] for each in report["layers"]] == ["sparse", "dense"]


SPARSE = ("--dense-below", 0, "--option", "block_size=32")


def test_short_prompt_runs_dense_and_says_so(flexmask, folder, prompt, tmp_path):
    out = tmp_path / "new" / "report.html"
    result = flexmask("inspect", folder, "--prompt", prompt, "--out", out)
    said = result.stdout
    assert "530 tokens < dense_below" in said
    assert "530 tokens < dense_below 16,384: the prompt runs dense" in result.stderr.partition("report:")[0]
    assert f"report: {out}" in said
    assert [path.name for path in out.parent.iterdir()] == ["report.html"]


@pytest.mark.attention
def test_json_holds_the_figures_of_the_page(flexmask, folder, prompt, tmp_path):
    out = tmp_path / "report.html"
    options = [*SPARSE, "--method", "flexprefill", "--gamma", 0.6, "--min-budget", 0, "--option", "tau=0.12"]
    found = flexmask("inspect", folder, "--prompt", prompt, "--out", out, *options, "--heads", "0:1,1:1", "--json").json
    assert found["report"] == str(out)
    expected = {"method": "flexprefill", "gamma": 0.6, "block_size": 32, "min_budget": 0, "tau": 0.12, "dense_below": 0}
    assert found["settings"] == expected
    assert {layer: len(shares) for layer, shares in found["coverage_by_quarter"].items()} == {"0": 4, "1": 4}
    assert [(each["layer"], each["head"], each["why"]) for each in found["shown"]] == [(0, 1, "named"), (1, 1, "named")]
    page = out.read_text(encoding="utf-8")
    assert all(f"{share:.1%}" in page for shares in found["coverage_by_quarter"].values() for share in shares)
