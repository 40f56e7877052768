"""Text is printed as it is, tables are not folded, JSON is ASCII."""

import json

from flexmask.commands.output import Output

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
