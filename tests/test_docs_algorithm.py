"""The table of docs/algorithm.md names existing functions, and every file of steps."""

from __future__ import annotations

import ast
import re

import pytest

from tests.repository import ROOT

# the oracle stands among the tests
FOLDERS = {"base": ROOT / "flexmask", "plain": ROOT / "flexmask", "kernels": ROOT / "flexmask", "oracle": ROOT / "tests"}
COLUMNS = ("paper's term", "plain", "kernel", "oracle")


def table(text: str) -> list[list[str]]:
    """The cells of every row below the header."""
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("|")]
    assert tuple(rows[0]) == COLUMNS
    return rows[2:]


def named(cell: str) -> list[tuple[str, str]]:
    """Every (path, function) of a cell: "`path`: `function`, `function`; `path`: `function`", or "none"."""
    pairs = []
    for place in cell.split(";"):
        match = re.fullmatch(r"\s*`([\w/]+\.py)`: (`\w+`(?:, `\w+`)*)", place)
        if match is None:
            assert cell == "none", f"neither `path`: `function` nor none: {cell}"
            continue
        pairs += [(match[1], name) for name in re.findall(r"\w+", match[2])]
    return pairs


def missing(rows: list[list[str]]) -> list[tuple[str, str]]:
    """The (path, function) pairs that do not exist."""
    absent = []
    for path, name in [pair for row in rows for cell in row[1:] for pair in named(cell)]:
        file = FOLDERS[path.partition("/")[0]] / path
        body = ast.parse(file.read_text(encoding="utf-8")).body if file.exists() else []
        if name not in {node.name for node in body if isinstance(node, ast.FunctionDef)}:
            absent.append((path, name))
    return absent


@pytest.fixture
def rows():
    return table((ROOT / "docs" / "algorithm.md").read_text(encoding="utf-8"))


def test_every_function_exists(rows):
    assert not missing(rows)


def test_every_cell_names_its_own_folder(rows):
    for term, plain, kernel, oracle in rows:
        assert all(path.startswith(("plain/", "base/")) for path, _ in named(plain)), term
        assert all(path.startswith(("kernels/", "base/")) for path, _ in named(kernel)), term
        assert all(path.startswith("oracle/") for path, _ in named(oracle)) and oracle != "none", term


@pytest.mark.parametrize("folder", ["plain", "kernels"])
def test_no_file_of_steps_is_left_out(rows, folder):
    paths = {path for row in rows for cell in row[1:] for path, _ in named(cell)}
    files = {f"{folder}/{file.name}" for file in (FOLDERS[folder] / folder).glob("*.py")}
    assert files - paths == {f"{folder}/__init__.py"}


@pytest.mark.parametrize("cell", ["`plain/top_p.py`: `top_q`", "`plain/top_k.py`: `top_p`", "`plain/top_p.py`: `top_p`, `rank`"])
def test_a_wrong_name_is_found(cell):
    header = "| " + " | ".join(COLUMNS) + " |\n| --- | --- | --- | --- |\n"
    assert len(missing(table(f"{header}| top-p | {cell} | none | none |\n"))) == 1
