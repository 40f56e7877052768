"""Workflows call targets that exist, and all files name the same versions."""

import re

import pytest

import flexmask
from tests.repository import ROOT

WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def text(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def targets_called(workflow: str) -> set[str]:
    called = set(re.findall(r"run: make ([a-z-]+)", workflow))
    for names in re.findall(r"target: \[(.*)\]", workflow):
        called |= set(names.replace(" ", "").split(","))
    return called


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_workflows_call_targets_that_exist(path):
    called = targets_called(path.read_text(encoding="utf-8"))
    assert called
    assert called <= set(re.findall(r"^([a-z-]+):", text("Makefile"), re.MULTILINE))


def test_workflow_runs_what_a_change_has_to_pass_on_the_oldest_and_newest_releases():
    workflow = text(".github/workflows/ci.yml")
    assert set(re.search(r"for target in (.*); do", text(".ci/run")).group(1).split()) <= targets_called(workflow)
    named = set(re.findall(r'"(torch|transformers)\(([\d.]+)\)"', workflow))
    pins = dict(re.findall(r"^(torch|transformers)==([\d.]+)", text("constraints.txt"), re.MULTILINE))
    sessions = text("noxfile.py")
    oldest = dict(re.findall(r'releases\("(torch|transformers)", "([\d.]+)"', sessions))
    newer = re.findall(r'releases\("(torch|transformers)".*newer=\("([\d.]+)"', sessions)
    assert newer
    assert named == {*pins.items(), *oldest.items(), *newer}


def test_version_is_the_same_everywhere():
    assert re.search(r"^version: (.*)$", text("CITATION.cff"), re.MULTILINE).group(1) == flexmask.__version__
    assert re.search(r"^## (\d+\.\d+\.\d+)", text("CHANGELOG.md"), re.MULTILINE).group(1) == flexmask.__version__


def test_table_of_versions_names_the_pins_and_the_oldest():
    table = text("docs/versions.md")
    for package in ("torch", "transformers", "triton"):
        pin = re.search(rf"^{package}==([\d.]+)", text("constraints.txt"), re.MULTILINE).group(1)
        assert re.search(rf"^\| {package} \|.*\b{re.escape(pin)}\b", table, re.MULTILINE), package
    for package in ("torch", "transformers"):
        assert re.search(rf'"{package}>=(\S+)"', text("pyproject.toml")).group(1) in table
