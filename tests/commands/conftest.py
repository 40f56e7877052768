"""The program in this process, and a tiny random model with a tokenizer."""

import json
from importlib.util import find_spec

import pytest

collect_ignore_glob = [] if find_spec("typer") and find_spec("rich") else ["test_*.py"]


@pytest.fixture
def flexmask():
    """Run a command, check its exit code, read `json` from stdout; returns what `CliRunner` caught."""
    from typer.testing import CliRunner

    from flexmask.commands.app import app

    def run(*words, code=0, input=None, env=None):
        # wide: no line of a table is folded
        result = CliRunner(env={"COLUMNS": "250", **(env or {})}).invoke(app, [str(word) for word in words], input=input)
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        assert result.exit_code == code, result.output
        result.json = json.loads(result.stdout) if "--json" in words and result.stdout else None
        return result

    return run


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """A saved model and a tokenizer of 96 words, w0 to w95."""
    pytest.importorskip("transformers")
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from transformers import PreTrainedTokenizerFast

    from tests.integrations.common import make_model

    path = tmp_path_factory.mktemp("model")
    make_model().save_pretrained(path)
    words = Tokenizer(WordLevel({f"w{number}": number for number in range(96)}, unk_token="w0"))
    words.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0", pad_token="w0").save_pretrained(path)
    return path


@pytest.fixture
def config(folder, tmp_path):
    """A folder of a config of three layers."""
    path = tmp_path / "config"
    path.mkdir()
    saved = json.loads((folder / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(saved | {"num_hidden_layers": 3}))
    return path


@pytest.fixture
def prompt(tmp_path):
    """A file of 530 words."""
    path = tmp_path / "prompt.txt"
    path.write_text(" ".join(f"w{1 + number * number % 95}" for number in range(530)))
    return path
