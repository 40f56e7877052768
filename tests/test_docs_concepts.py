"""The pictures and figures of docs/concepts.md are those of the selection."""

from __future__ import annotations

import re
from functools import cache

import pytest

pytest.importorskip("transformers")

from bench.concepts import draw, steps
from tests.repository import ROOT


@cache
def page() -> str:
    return (ROOT / "docs/concepts.md").read_text(encoding="utf-8")


def test_the_page_names_the_figures():
    numbers = set(re.findall(r"\d+(?:\.\d+)?%?", page()))
    missing = {name: value for name, value in steps.facts().items() if value not in numbers}
    assert missing == {}


def test_the_page_shows_every_picture():
    assert re.findall(r"\]\(concepts/(.*)\.png\)", page()) == list(draw.PICTURES)
    assert all((ROOT / f"docs/concepts/{name}.png").stat().st_size > 10_000 for name in draw.PICTURES)


def test_steps_that_keep_other_blocks_are_not_drawn(monkeypatch):
    monkeypatch.setattr(steps, "NEAREST", steps.NEAREST + 3)
    with pytest.raises(RuntimeError, match=r"the steps keep other blocks than .*hybrid"):
        steps.heads()


@pytest.mark.slow
def test_pictures_are_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    for path in draw.draw(tmp_path):
        assert path.stat().st_size > 10_000
