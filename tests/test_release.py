"""All files name the same versions."""

import re

import flexmask
from tests.repository import ROOT


def text(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def test_the_workflow_runs_the_oldest_and_newest_releases():
    named = set(re.findall(r'"(torch|transformers)\(([\d.]+)\)"', text(".github/workflows/ci.yml")))
    pins = re.findall(r"^(torch|transformers)==([\d.]+)", text("constraints.txt"), re.MULTILINE)
    oldest = re.findall(r'releases\("(torch|transformers)", "([\d.]+)"', text("noxfile.py"))
    newer = re.findall(r'releases\("(torch|transformers)".*newer=\("([\d.]+)"', text("noxfile.py"))
    assert newer and named == {*pins, *oldest, *newer}


def test_version_is_the_same_everywhere():
    assert re.search(r"^version: (.*)$", text("CITATION.cff"), re.MULTILINE).group(1) == flexmask.__version__
    assert re.search(r"^## (\d+\.\d+\.\d+)", text("CHANGELOG.md"), re.MULTILINE).group(1) == flexmask.__version__


def test_table_of_versions_names_the_pins_and_the_oldest():
    table = text("docs/versions.md")
    for package in ("torch", "transformers", "triton"):
        pin = re.search(rf"^{package}==([\d.]+)", text("constraints.txt"), re.MULTILINE).group(1)
        assert re.search(rf"^\| {package} \|.*\b{re.escape(pin)}\b", table, re.MULTILINE), package
    for package in ("torch", "transformers"):
        assert re.search(rf'"{package}>=([\d.]+)', text("pyproject.toml")).group(1) in table


def test_extras_install_the_releases_of_transformers_that_the_adapter_serves():
    code = text("flexmask/environment.py")
    oldest, newest = re.search(r"^OLDEST, NEWEST = \((.*)\), \((.*)\)$", code, re.MULTILINE).groups()
    served = f">={oldest.replace(', ', '.')},<{newest.split(', ')[0]}.{int(newest.split(', ')[1]) + 1}"
    assert set(re.findall(r'"transformers([^"]*)"', text("pyproject.toml"))) == {served}


def test_badges_name_the_versions():
    project = text("pyproject.toml")
    pins = dict(re.findall(r"^([\w-]+)==(\d+\.\d+)", text("constraints.txt"), re.MULTILINE))
    newer = dict(re.findall(r'releases\("(\w+)".*newer=\("(\d+\.\d+)', text("noxfile.py")))
    least = {name: re.search(rf"{name}>=([\d.]+)", project) for name in ("torch", "transformers")}
    for name, found in least.items():
        assert found is not None
        assert f"{name}: {found[1]} to {newer.get(name, pins[name])}<" in text(f"docs/badges/{name}.svg")
    python = re.search(r'requires-python = ">=([\d.]+)"', project)
    assert python is not None and f"python: {python[1]}+<" in text("docs/badges/python.svg")
