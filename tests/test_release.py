"""All files name the same versions."""

import re

import flexmask
from tests.repository import ROOT


def text(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


# releases by package: pinned, the oldest and the newest that are tried, and the least that may be installed
PINS = dict(re.findall(r"^([\w-]+)==([\d.]+)", text("constraints.txt"), re.MULTILINE))
OLDEST = dict(re.findall(r'releases\("(\w+)", "([\d.]+)"', text("noxfile.py")))
NEWER = dict(re.findall(r'releases\("(\w+)".*newer=\("([\d.]+)"', text("noxfile.py")))
LEAST = dict(re.findall(r'"(torch|transformers)>=([\d.]+)', text("pyproject.toml")))


def test_the_workflow_runs_the_oldest_and_newest_releases():
    named = set(re.findall(r'"(torch|transformers)\(([\d.]+)\)"', text(".github/workflows/ci.yml")))
    assert NEWER and OLDEST.keys() == LEAST.keys() == {"torch", "transformers"}
    assert named == {*OLDEST.items(), *NEWER.items(), *((name, PINS[name]) for name in OLDEST)}


def test_version_is_the_same_everywhere():
    assert re.search(r"^version: (.*)$", text("CITATION.cff"), re.MULTILINE).group(1) == flexmask.__version__
    assert re.search(r"^## (\d+\.\d+\.\d+)", text("CHANGELOG.md"), re.MULTILINE).group(1) == flexmask.__version__


def test_table_of_versions_names_the_pins_and_the_oldest():
    table = text("docs/versions.md")
    for package in ("torch", "transformers", "triton"):
        assert re.search(rf"^\| {package} \|.*\b{re.escape(PINS[package])}\b", table, re.MULTILINE), package
    assert all(least in table for least in LEAST.values())


def test_extras_install_the_releases_of_transformers_that_the_adapter_serves():
    code = text("flexmask/environment.py")
    oldest, newest = re.search(r"^OLDEST, NEWEST = \((.*)\), \((.*)\)$", code, re.MULTILINE).groups()
    served = f">={oldest.replace(', ', '.')},<{newest.split(', ')[0]}.{int(newest.split(', ')[1]) + 1}"
    assert set(re.findall(r'"transformers([^"]*)"', text("pyproject.toml"))) == {served}


def test_badges_name_the_versions():
    for name, least in LEAST.items():
        newest = re.match(r"\d+\.\d+", NEWER.get(name, PINS[name]))[0]
        assert f"{name}: {least} to {newest}<" in text(f"docs/badges/{name}.svg")
    python = re.search(r'requires-python = ">=([\d.]+)"', text("pyproject.toml"))[1]
    assert f"python: {python}+<" in text("docs/badges/python.svg")
