"""`flexmask run`: programs and their children with the name registered; settings; refusals."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("typer")
pytest.importorskip("transformers")

from flexmask.commands import run as command
from tests.repository import ROOT, module_of

# prints what a model with this attention would run with
PROGRAM = """
import json, sys

def show():
    from transformers import AttentionInterface
    from flexmask.integrations.huggingface.model_config import process_settings
    known = AttentionInterface()
    own = getattr(known["flex_attention"], "func", known["flex_attention"]).__module__
    print(json.dumps([sys.argv[1:], "flexmask" in known.valid_keys(), process_settings().to_dict(), own]), flush=True)

if __name__ == "__main__":
    show()
    if sys.argv[1:] == ["child"]:
        import multiprocessing
        child = multiprocessing.get_context("spawn").Process(target=show)
        child.start()
        child.join()
    sys.exit(7)
"""


@pytest.fixture
def program(tmp_path):
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    return path


def in_environment(*words, **variables):
    """Output of a Python that starts with our folder first."""
    environment = {**os.environ, "PYTHONPATH": str(command.STARTUP), **variables}
    # python -c looks in the current folder first
    words = [sys.executable, *map(str, words)]
    return subprocess.run(words, cwd=command.STARTUP, env=environment, capture_output=True, text=True, check=True).stdout


def test_program_and_its_child_know_the_name_and_the_settings(program):
    run = subprocess.run(
        [sys.executable, "-m", "flexmask", "run", "--gamma", "0.5", "--min-budget", "256", str(program), "child"],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 7, run.stderr
    lines = [json.loads(line) for line in run.stdout.splitlines()]
    assert [line[:3] for line in lines] == [[["child"], True, {"gamma": 0.5, "min_budget": 256}]] * 2
    assert not lines[0][3].startswith("flexmask")


def test_nothing_is_imported_for_a_program_without_transformers(tmp_path):
    """And a hidden `sitecustomize` still runs."""
    (tmp_path / "sitecustomize.py").write_text("print('own sitecustomize')")
    path = os.pathsep.join([str(command.STARTUP), str(tmp_path)])
    code = "import sys; print('torch' in sys.modules, 'flexmask' in sys.modules)"
    assert in_environment("-c", code, PYTHONPATH=path).splitlines() == ["own sitecustomize", "False False"]


def test_name_is_registered_when_the_outermost_import_has_ended(tmp_path):
    """With a fake transformers and a fake flexmask, which import one another."""
    package = tmp_path / "transformers"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "outer.py").write_text("from transformers import modeling_utils; COMPLETE = True")
    (package / "modeling_utils.py").write_text("")
    root = tmp_path / "flexmask"
    (root / "commands" / "startup").mkdir(parents=True)
    copy = root / "commands" / "startup" / "sitecustomize.py"
    copy.write_text((command.STARTUP / copy.name).read_text())
    (root / "integrations").mkdir()
    for name in ("__init__", "integrations/__init__"):
        (root / f"{name}.py").write_text("")
    (root / "integrations" / "huggingface.py").write_text(
        "from transformers import outer\nPrefillSettings = None\n"
        "def register(settings, name): print(outer.COMPLETE, settings, name)"
    )
    for outermost in ("transformers.outer", "flexmask.integrations.huggingface"):
        code = f"import transformers; print('before'); import {outermost}; print('after'); import transformers.modeling_utils"
        path = os.pathsep.join([str(copy.parent), str(tmp_path)])
        out = in_environment("-c", code, PYTHONPATH=path, FLEXMASK_SETTINGS="x.json")
        assert out.splitlines() == ["before", "True x.json flexmask", "after"]


def test_environment_is_what_a_shell_sets(flexmask, monkeypatch):
    monkeypatch.delenv("PYTHONPATH", raising=False)
    words = ("run", "--environment", "--gamma", ".5", "--method", "flexprefill")
    variables = flexmask(*words, "--json").json
    assert variables == {
        "PYTHONPATH": str(command.STARTUP),
        "FLEXMASK_NAME": "flexmask",
        "FLEXMASK_SETTINGS": '{"method": "flexprefill", "gamma": 0.5}',
    }
    show = f"{sys.executable} -c 'import os, json; print(json.dumps(dict(os.environ)))'"
    lines = flexmask(*words).stdout
    run = subprocess.run(["sh", "-c", f'eval "$(cat)"; {show}'], input=lines, capture_output=True, text=True, check=True)
    assert json.loads(run.stdout).items() >= variables.items()
    monkeypatch.setenv("PYTHONPATH", "before")
    assert flexmask(*words, "--json").json["PYTHONPATH"] == os.pathsep.join([str(command.STARTUP), "before"])


def test_wrong_settings_in_the_environment_are_one_line(monkeypatch, capsys):
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if "sitecustomize" not in entry])
    monkeypatch.setenv("FLEXMASK_SETTINGS", '{"gamma": 5}')
    module = module_of(command.STARTUP / "sitecustomize.py")
    sys.meta_path.pop(0)
    module._register()
    assert capsys.readouterr().err == (
        'flexmask: "flexmask" is not registered: ValueError: FLEXMASK_SETTINGS: gamma must be in (0, 1]; got 5\n'
    )


@pytest.fixture
def execve(monkeypatch):
    """The command that would be started."""
    calls = []

    def become(path, arguments, environment):
        calls.append((arguments, environment))
        raise SystemExit(0)

    monkeypatch.setattr(os, "execve", become)
    return calls


@pytest.mark.skipif(os.name != "posix", reason="a child process elsewhere")
def test_modules_files_and_commands_are_distinguished(flexmask, execve, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here.py").write_text("")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "__main__.py").write_text("")
    (tmp_path / "folder" / "__init__.py").write_text("raise AssertionError('imported')")
    for words, expected in [
        (["here.py", "-x"], ["here.py", "-x"]),
        (["here"], ["-m", "here"]),
        (["folder", "--json"], ["-m", "folder", "--json"]),
        (["json.tool", "--json"], ["-m", "json.tool", "--json"]),
        (["--as", "flex_attention", "json.tool", "--gamma", "2", "--help"], ["-m", "json.tool", "--gamma", "2", "--help"]),
    ]:
        flexmask("run", *words)
        assert execve[-1][0] == [sys.executable, *expected]
    assert execve[-1][1]["FLEXMASK_NAME"] == "flex_attention"
    # transformers has no __main__, and a command
    flexmask("run", "transformers", "env")
    executable, option, code, word = execve[-1][0]
    assert (executable, option, word) == (sys.executable, "-c", "env")
    assert "sys.argv[0] = 'transformers'" in code
    compile(code, "code", "exec")
    assert execve[-1][1]["FLEXMASK_SETTINGS"] == ""


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["no-such-thing"], "neither a module that python -m can run nor an installed command: no-such-thing"),
        (["nowhere.py"], "no file nowhere.py"),
        ([], "must be a module, a file or a command to start"),
        (["--gamma", "0", "json.tool"], "'--gamma': gamma must be in (0, 1]"),
        (["--as", "sdpa", "json.tool"], "'--as': must be one of flexmask, flex_attention; got 'sdpa'"),
    ],
)
def test_run_refuses(flexmask, words, said):
    assert said in " ".join(flexmask("run", *words, code=2).stderr.split())


def test_startup_folder_holds_one_file():
    """Its files come before a program's own modules."""
    assert [path.name for path in command.STARTUP.glob("*.py")] == ["sitecustomize.py"]
    assert Path(command.__file__).parent in command.STARTUP.parents
