"""The Python code in the READMEs runs as it stands, block after block, as somebody who tries them out would run it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
import torch._dynamo

ROOT = Path(__file__).resolve().parent.parent


def python_blocks(text: str) -> list[tuple[int, str]]:
    """Fenced blocks marked python: the number of lines before the code, and the code."""
    blocks = re.finditer(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [(text.count("\n", 0, block.start(1)), block.group(1)) for block in blocks]


def run(path: Path) -> None:
    """Run the blocks of a file in one namespace; a traceback shows the file's own lines."""
    blocks = python_blocks(path.read_text(encoding="utf-8"))
    assert blocks, f"{path.name} has no Python code"
    names = {"__name__": "__main__"}
    for line, code in blocks:
        exec(compile("\n" * line + code, str(path), "exec"), names)


@pytest.fixture(autouse=True)
def _leave_no_trace(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield
    torch._dynamo.reset()


@pytest.mark.parametrize("name", ["README.md", "block_masks/README.md"])
def test_code_runs(name):
    run(ROOT / name)


def test_blocks_are_found_with_their_lines():
    text = "# Title\n\n```python\nx = 1\n```\n\n```\nnot python\n```\n\n```python\ny = x\n\nz = y\n```\n"
    assert python_blocks(text) == [(3, "x = 1\n"), (11, "y = x\n\nz = y\n")]


def test_failing_code_fails_at_its_line(tmp_path):
    path = tmp_path / "text.md"
    path.write_text("Text.\n\n```python\nx = 1\nassert x == 2\n```\n", encoding="utf-8")
    with pytest.raises(AssertionError) as failure:
        run(path)
    assert failure.traceback[-1].lineno == 4  # counted from 0


def test_no_code_is_a_failure(tmp_path):
    path = tmp_path / "text.md"
    path.write_text("Text.\n", encoding="utf-8")
    with pytest.raises(AssertionError, match=r"text\.md has no Python code"):
        run(path)
