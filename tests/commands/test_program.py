"""The program: entry point, exit codes, errors in one line; text, tables and JSON as they are printed."""

import json
import re
import sys
from importlib.util import find_spec
from unittest.mock import Mock

import pytest

import flexmask as package
from flexmask import __main__ as main
from flexmask import commands
from flexmask.commands.output import Output
from tests.repository import ROOT, python


def test_module_and_entry_point_are_the_program():
    assert python("-m", "flexmask", "--version") == f"flexmask {package.__version__}\n"
    tomllib = pytest.importorskip("tomllib", reason="Python 3.10 cannot read TOML")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert project["project"]["scripts"] == {"flexmask": f"{main.__name__}:{main.main.__name__}"}


def test_every_command_is_documented_with_its_options(flexmask):
    text = (ROOT / "docs" / "command-line.md").read_text(encoding="utf-8")
    listed = re.findall(r"^│? *(\w+)  ", flexmask("--help").stdout.partition("Commands")[2], re.MULTILINE)
    assert {"doctor", "gain", "inspect"} == set(listed)
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
    code = "import atexit, flexmask.__main__ as program; atexit.register(print, '|\u0394|'); program.main()"
    assert python("-c", code, "--version", PYTHONIOENCODING="ascii").endswith("\n|\\u0394|\n")


INSPECT = "inspect {folder} --prompt {prompt} --out {out}"
REFUSED = [
    ("nothing", "No such command 'nothing'"),
    ("doctor --device nowhere", "'--device': no such device"),
    ("doctor --dtype int8", "'--dtype': must be one of float32, bfloat16, float16; got 'int8'"),
    ("doctor --gamma 1.5", "'--gamma': gamma must be in (0, 1]; got 1.5"),
    ("doctor --method best", "'--method': method must be one of"),
    ("doctor --option tau", "'--option': must be NAME=VALUE; got 'tau'"),
    ("doctor --gamma .9 --option gamma=.8", "'--option': gamma is given twice"),
    ('doctor --option layers={{"1":{{}},"01":{{}}}}', "'--option': layers must have each layer once; got 1 twice"),
    ('doctor --option layers={{"1":{{}},"1":{{}}}}', "'--option': an object must have each key once; got '1' twice"),
    ("doctor --option tau=0.1", "'--option': method 'hybrid' takes the options gamma"),
    ("doctor --method causal --gamma 0.1", "'--gamma': method 'causal' takes no options of its own"),
    ("doctor --settings nowhere.json", "'--settings': cannot read nowhere.json: No such file"),
    *((f"doctor --settings {{{name}}}", f"'--settings': {{{name}}}: ") for name in ("blank", "list", "number")),
    ("doctor --settings {heads} --gamma .9", "'--gamma': gamma cannot override gamma of layer 3 in {heads}"),
    ("doctor --settings {drawn} --method causal", "'--method': method cannot override 'hybrid' in {drawn}, whose gamma"),
    ("gain {folder}", "Missing option '--prompt'"),
    ("gain --prompt {prompt}", "Missing argument 'MODEL'"),
    ("gain x --prompt x --gama 1", "--gama"),
    *(
        (f"{command} --{given}", f"'--{given.split()[0]}': dense_layers must hold layer indices below 2")
        for command in ("gain {folder} --prompt {prompt}", INSPECT)
        for given in ("option dense_layers=[9]", "settings {ninth}")
    ),
    ("doctor nowhere/at/all", "'MODEL': no folder nowhere/at/all"),
    ("gain {empty} --prompt {prompt}", "is not a model: it has no config.json"),
    ("gain {folder} --prompt {empty}/none.txt", "none.txt: No such file"),
    ("gain {folder} --prompt {blank}", "'--prompt': {blank} is empty"),
    ("gain {folder} --prompt {binary}", "not UTF-8 text"),
    ("gain {folder} --prompt {one}", "'--prompt': must hold at least two tokens; got 1"),
    ("inspect {folder} --prompt {one} --out {out}", "'--prompt': must hold at least two tokens; got 1"),
    (f"{INSPECT} --heads 0", "'--heads': must be LAYER:HEAD pairs, as in 0:3,5:1; got '0'"),
    (f"{INSPECT} --heads 7:0", "'--heads': heads must be pairs of a layer and a head that ran sparse; got (7, 0)"),
    (f"{INSPECT} --out {{empty}}", "is a folder"),
    (f"{INSPECT} --out {{blank}}/page.html", "'--out': cannot write {blank}/page.html"),
]


@pytest.fixture
def places(tmp_path, request):
    """Paths by name; a model and a prompt where transformers is installed."""
    contents = {"blank": b" \n", "binary": b"\xff\xfe\x00", "one": b"w1", "list": b"[]", "number": b'{"gamma": 3}'}
    contents |= {"ninth": b'{"dense_layers": [9]}', "drawn": b'{"gamma": 0.5}'}
    contents["heads"] = b'{"layers": {"3": {"gamma": [0.5, 0.9]}}}'
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
    (tmp_path / "empty").mkdir()
    made = {name: tmp_path / name for name in (*contents, "empty", "out")}
    return {**made, **{name: request.getfixturevalue(name) for name in ("folder", "prompt") if find_spec("transformers")}}


@pytest.mark.parametrize(("words", "said"), REFUSED)
def test_wrong_usage_is_told(flexmask, places, words, said):
    result = flexmask(*words.format(**places).split(), code=2)
    assert said.format(**places) in " ".join(result.stderr.replace("│", " ").split())
    assert (result.stdout, places["out"].exists()) == ("", False)
    assert "Traceback" not in result.output


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (RuntimeError("out of luck"), commands.PROBLEM, "RuntimeError: out of luck"),
        (KeyboardInterrupt(), commands.INTERRUPTED, "interrupted"),
    ],
    ids=["error", "interrupt"],
)
def test_errors_of_the_library_and_interrupts_are_one_line(flexmask, monkeypatch, error, code, said):
    monkeypatch.setattr("flexmask.environment.known_issues", Mock(side_effect=error))
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


def test_tables_in_a_pipe_are_not_folded_and_percentages_stand_right(capsys):
    long = "/a/folder" * 40
    Output().table(["kept", "name"], [["100.0%", long], ["9.5%", "b"]])
    assert [line.rstrip() for line in capsys.readouterr().out.splitlines()[1:]] == [f"100.0%  {long}", "  9.5%  b"]


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
