"""The program: entry point, exit codes, errors in one line; text, tables and JSON as they are printed."""

import json
import os
import re
import subprocess
import sys

import pytest

import flexmask as package
from flexmask import commands
from flexmask.commands import main
from flexmask.commands.output import Output
from tests.repository import ROOT


def test_module_and_entry_point_are_the_program():
    run = subprocess.run([sys.executable, "-m", "flexmask", "--version"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert run.stdout == f"flexmask {package.__version__}\n"
    tomllib = pytest.importorskip("tomllib", reason="Python 3.10 cannot read TOML")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert project["project"]["scripts"] == {"flexmask": f"{main.__name__}:{main.main.__name__}"}
    folders = [path.parent.relative_to(ROOT) for path in (ROOT / "flexmask" / "commands").rglob("*.py")]
    assert {".".join(folder.parts) for folder in folders} <= set(project["tool"]["setuptools"]["packages"])


def test_every_command_is_documented_with_its_options(flexmask):
    text = (ROOT / "docs" / "command-line.md").read_text(encoding="utf-8")
    listed = re.findall(r"^│? *(\w+)  ", flexmask("--help").stdout.partition("Commands")[2], re.MULTILINE)
    assert {"doctor", "gain", "inspect", "tune"} == set(listed)
    for command in listed:
        assert f"## flexmask {command}" in text
        section = text.partition(f"## flexmask {command}")[2].partition("\n## ")[0]
        shared = text.partition("## Options that commands share")[2].partition("\n## ")[0]
        options = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", flexmask(command, "--help").stdout)) - {"--help"}
        assert options, command
        assert {option for option in options if option not in section + shared} == set(), command


def test_exit_codes_are_documented():
    text = (ROOT / "docs" / "command-line.md").read_text(encoding="utf-8")
    codes = {value for value in vars(commands).values() if type(value) is int}
    assert {int(code) for code in re.findall(r"^\| (\d+) \|", text, re.MULTILINE)} == {0, 2} | codes


def test_without_typer_one_line_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "typer", None)
    for name in [name for name in sys.modules if name.startswith("flexmask.commands.")]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(SystemExit) as exit:
        main.main()
    assert exit.value.code == commands.MISSING
    assert capsys.readouterr().err == "flexmask: the command line needs typer: pip install 'flexmask[cli]'\n"


def test_characters_that_stdout_lacks_are_escaped():
    code = "import atexit, flexmask.commands.main as program; atexit.register(print, '|\u0394|'); program.main()"
    command = [sys.executable, "-c", code, "--version"]
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    assert run.stdout.endswith("\n|\\u0394|\n")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["nothing"], "No such command 'nothing'"),
        (["gain"], "'MODEL': give a model: its folder, or its name on the hub"),
        (["gain", "x", "--model", "x"], "'--model': give the model once"),
        (["gain", "nowhere/at/all", "--tokens", "300", "--prompt", "x"], "'--tokens': give one of --prompt and --tokens"),
        (["gain", "--model", "x", "--prompt", "x", "--gama", "1"], "--gama"),
        (["doctor", "--device", "nowhere"], "'--device': no such device"),
        (["doctor", "--dtype", "int8"], "'--dtype': must be one of float32, bfloat16, float16; got 'int8'"),
        (["doctor", "--gamma", "1.5"], "'--gamma': gamma must be in (0, 1]; got 1.5"),
        (["doctor", "--method", "best"], "'--method': method must be one of"),
        (["doctor", "--option", "tau"], "'--option': must be NAME=VALUE; got 'tau'"),
        (["doctor", "--gamma", ".9", "--option", "gamma=.8"], "'--option': gamma is given twice"),
        (["doctor", "--option", "tau=0.1"], "'--option': method 'hybrid' takes the options gamma"),
        (["doctor", "--method", "causal", "--gamma", "0.1"], "'--gamma': method 'causal' takes the options of every mask only"),
        (["doctor", "--settings", "nowhere.json"], "'--settings': cannot read nowhere.json: No such file"),
    ],
)
def test_wrong_usage_names_the_option(flexmask, words, said):
    result = flexmask(*words, code=2)
    assert said in result.stderr
    assert result.stdout == ""
    assert "Traceback" not in result.output


@pytest.mark.parametrize("text", ["", "[]", '{"gamma": 3}'])
def test_a_settings_file_of_something_else_is_refused(flexmask, tmp_path, text):
    path = tmp_path / "settings.json"
    path.write_text(text)
    said = flexmask("doctor", "--settings", path, code=2).stderr
    assert f"'--settings': {path}: " in said


def test_one_gamma_does_not_override_gammas_per_head(flexmask, tmp_path):
    path = tmp_path / "settings.json"
    path.write_text(json.dumps({"layers": {"3": {"gamma": [0.5, 0.9]}}}))
    said = flexmask("doctor", "--settings", path, "--gamma", ".9", code=2).stderr
    assert f"'--gamma': {path} sets gamma of layer 3, which one gamma cannot override" in said


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (RuntimeError("out of luck"), commands.PROBLEM, "RuntimeError: out of luck"),
        (KeyboardInterrupt(), commands.INTERRUPTED, "interrupted"),
    ],
    ids=["error", "interrupt"],
)
def test_errors_of_the_library_and_interrupts_are_one_line(flexmask, monkeypatch, error, code, said):
    def fails(device):
        raise error

    monkeypatch.setattr("flexmask.environment.problems", fails)
    result = flexmask("doctor", "--json", code=code)
    assert result.stderr == f"flexmask: {said}\n"
    assert result.stdout == ""
    if code == commands.PROBLEM:
        assert "Traceback" in flexmask("--traceback", "doctor", code=code).stderr
        assert "Traceback" in flexmask("doctor", code=code, env={"FLEXMASK_TRACEBACK": "1"}).stderr


ODD = "a:package:b [bold]c[/x] é"


def test_text_is_printed_as_it_is(capsys):
    output = Output()
    output.line(ODD)
    output.table([ODD, "x"], [[ODD, 1.5]], title=f"about {ODD}")
    output.remark(ODD)
    found = capsys.readouterr()
    assert found.out.splitlines()[0] == ODD
    assert found.out.count(ODD) == 4
    assert found.err == f"{ODD}\n"


def test_tables_in_a_pipe_are_not_folded(capsys):
    long = "/a/folder" * 40
    Output().table(["model", "why"], [[long, "none"]])
    assert any(line.split() == [long, "none"] for line in capsys.readouterr().out.splitlines())


def test_columns_of_percentages_stand_right(capsys):
    Output().table(["kept", "name"], [["100.0%", "a"], ["9.5%", "b"]])
    assert capsys.readouterr().out.splitlines()[1:] == ["100.0%  a   ", "  9.5%  b   "]


def test_json_is_ascii(capsys):
    Output(as_json=True).result({"text": ODD, "missing": float("nan")})
    text = capsys.readouterr().out
    assert text.isascii()
    assert json.loads(text) == {"text": ODD, "missing": None}


def test_progress_in_a_log_is_a_line_for_each_tenth(capsys):
    with Output().progress("measuring 2 texts") as advance:
        for done in range(41):
            advance(done, 40)
    lines = capsys.readouterr().err.splitlines()
    assert lines[:2] == ["measuring 2 texts", "measuring 2 texts: 4 of 40"]
    assert len(lines) == 11
    with Output().progress("drawing"):
        assert capsys.readouterr().err == "drawing\n"
    with Output(as_json=True).progress("measuring 2 texts") as advance:
        advance(1, 2)
    assert capsys.readouterr() == ("", "")
