"""`flexmask inspect` on a tiny model."""

import pytest

pytest.importorskip("transformers")
pytest.importorskip("matplotlib")


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
    options = ["--dense-below", 0, "--method", "flexprefill", "--gamma", 0.6, "--min-budget", 0]
    options += ["--option", "block_size=32", "--option", "tau=0.12"]
    found = flexmask("inspect", folder, "--prompt", prompt, "--out", out, *options, "--heads", "0:1,1:1", "--json").json
    assert found["report"] == str(out)
    expected = {"method": "flexprefill", "gamma": 0.6, "block_size": 32, "min_budget": 0, "tau": 0.12, "dense_below": 0}
    assert found["settings"] == expected
    assert {layer: len(shares) for layer, shares in found["coverage_by_quarter"].items()} == {"0": 4, "1": 4}
    assert [(each["layer"], each["head"], each["why"]) for each in found["shown"]] == [(0, 1, "named"), (1, 1, "named")]
    page = out.read_text(encoding="utf-8")
    assert all(f"{share:.1%}" in page for shares in found["coverage_by_quarter"].values() for share in shares)
