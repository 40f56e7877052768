"""``flexmask inspect`` on a tiny model; the engine has its own tests."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("typer")
pytest.importorskip("transformers")
pytest.importorskip("matplotlib")

from typer.testing import CliRunner

from flexmask.commands.app import app
from tests.integrations.common import MARKS, make_model

pytestmark = MARKS[0]
WORDS = 96


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from transformers import PreTrainedTokenizerFast

    path = tmp_path_factory.mktemp("inspected")
    make_model().save_pretrained(path)
    words = Tokenizer(WordLevel({f"w{number}": number for number in range(WORDS)}, unk_token="w0"))
    words.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0", pad_token="w0").save_pretrained(path)
    return path


@pytest.fixture
def prompt_file(tmp_path):
    path = tmp_path / "prompt.txt"
    path.write_text(" ".join(f"w{1 + number * number % (WORDS - 1)}" for number in range(530)))
    return path


def inspect(*words, code=0):
    result = CliRunner(env={"COLUMNS": "250"}).invoke(app, ["inspect", *map(str, words)])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == code, result.output
    return result


def test_short_prompt_runs_dense_and_says_so(model_folder, prompt_file, tmp_path):
    out = tmp_path / "report"
    said = inspect("--model", model_folder, "--prompt", prompt_file, "--out", out).stdout
    assert "530 tokens < dense_below" in said
    assert f"report: {out / 'report.html'}" in said
    assert {path.name for path in out.iterdir()} == {"report.html", "inspection.json", "density.png", "patterns.png"}


@pytest.mark.attention
def test_json_is_what_is_written(model_folder, prompt_file, tmp_path):
    out = tmp_path / "report"
    options = ["--dense-below", 0, "--gamma", 0.6, "--set", "block_size=32", "--set", "min_budget=0", "--set", "tau=0.12"]
    where = ["--model", model_folder, "--prompt", prompt_file, "--out", out]
    found = json.loads(inspect(*where, *options, "--layers", "0-1", "--heads", "1", "--json").stdout)
    assert found["report"] == str(out / "report.html")
    written = json.loads((out / "inspection.json").read_text(encoding="utf-8"))
    assert {name: value for name, value in found.items() if name != "report"} == written
    assert written["settings"] == {"gamma": 0.6, "block_size": 32, "min_budget": 0, "tau": 0.12, "dense_below": 0}
    assert [(each["layer"], each["head"]) for each in written["shown"]] == [(0, 1), (1, 1)]
    assert (out / "layer1-head1-left-out.png").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--heads", "0"], "must come with --layers"),
        (["--layers", "a"], "must be numbers and ranges, as in 0,5-7; got 'a'"),
        (["--layers", "3-1"], "must name at least one"),
        (["--layers", "7"], r"layers must be in [0, 2); got 7"),
        (["--gamma", "2"], "gamma must be"),
        (["--set", "method=causal"], "only FlexPrefill is inspected; got the method 'causal'"),
    ],
)
def test_wrong_options_are_usage_errors(model_folder, prompt_file, tmp_path, options, message):
    result = inspect("--model", model_folder, "--prompt", prompt_file, "--out", tmp_path / "out", *options, code=2)
    assert message in " ".join(result.stderr.replace("│", " ").split())
    assert not (tmp_path / "out").exists()


def test_a_file_is_no_folder(model_folder, prompt_file):
    result = inspect("--model", model_folder, "--prompt", prompt_file, "--out", prompt_file, code=2)
    assert "is not a folder" in " ".join(result.stderr.replace("│", " ").split())
