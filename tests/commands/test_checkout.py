"""`flexmask demo`, `bench` and `fidelity`: started in a checkout; without one, a line says how to get it."""

from __future__ import annotations

import pytest

pytest.importorskip("typer")

from flexmask.commands import checkout, exit_codes


@pytest.fixture
def folder(tmp_path):
    """A folder like a checkout, whose programs print their arguments and exit with 5."""
    for name in ("__init__.py", "demo.py", "parts.py", "fidelity/run.py"):
        path = tmp_path / "bench" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(
            "" if name == "__init__.py" else "import os, sys; print(__file__, os.getcwd(), sys.argv[1:]); sys.exit(5)"
        )
    return tmp_path


@pytest.mark.parametrize(("name", "module"), [("demo", "demo"), ("bench", "parts"), ("fidelity", "fidelity/run")])
def test_program_gets_the_words_and_gives_its_exit_code(flexmask, folder, tmp_path, monkeypatch, name, module):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    found = flexmask(name, "--checkout", folder, "latency", "--minutes", "5", "--json", code=5).json
    assert found["arguments"] == ["latency", "--minutes", "5"]
    assert found["exit_code"] == 5
    assert found["output"] == [f"{folder / 'bench' / module}.py {elsewhere} ['latency', '--minutes', '5']"]
    assert flexmask(name, "--json", code=5, env={"FLEXMASK_CHECKOUT": str(folder)}).json["checkout"] == str(folder)


@pytest.mark.parametrize("name", ["demo", "bench", "fidelity"])
def test_without_a_checkout_one_line_says_how_to_get_one(flexmask, monkeypatch, tmp_path, name):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(checkout.flexmask, "__file__", str(tmp_path / "site-packages" / "flexmask" / "__init__.py"))
    result = flexmask(name, code=exit_codes.MISSING)
    assert result.stderr.startswith("flexmask: the benchmarks are not in the installed package: unpack the source distribution")
    assert result.stderr.count("\n") == 1
    assert "is no checkout of flexmask" in flexmask(name, "--checkout", tmp_path, code=exit_codes.USAGE).stderr


def test_own_checkout_is_found(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert (checkout.find_checkout() / "bench" / "fidelity" / "run.py").is_file()
