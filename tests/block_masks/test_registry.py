"""The registry, the exports, the files, the README's table and the signatures of the gallery agree."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

import flexmask.block_masks
from flexmask import flexprefill_mask
from flexmask.block_masks import MASKS, causal_mask
from tests.block_masks.gallery import KEEP_EVERYTHING, SPARSE, all_masks, made

FOLDER = Path(__file__).resolve().parents[2] / "block_masks"


def test_registry_exports_and_files_agree():
    files = {path.stem for path in FOLDER.glob("*.py")} - {"__init__"}
    assert set(MASKS) == files
    assert flexmask.block_masks.__all__ == ["MASKS", *(f"{name}_mask" for name in sorted(MASKS))]
    for name, function in MASKS.items():
        assert function is getattr(flexmask.block_masks, f"{name}_mask")
        assert function.__name__ == f"{name}_mask"
    assert MASKS["flexprefill"] is flexprefill_mask


def test_registry_and_readme_table_agree():
    rows = re.findall(r"^\| \[`(\w+)`\]\((\w+\.py)\) \|", (FOLDER / "README.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert rows == [(f"{name}_mask", f"{name}.py") for name in sorted(MASKS)]


@all_masks
def test_readme_table_names_every_knob(name):
    row = re.search(rf"^\| \[`{name}_mask`\].*$", (FOLDER / "README.md").read_text(encoding="utf-8"), re.MULTILINE)
    knobs = set(re.findall(r"`(\w+)`", row.group().rsplit(" | ", 1)[1]))
    not_knobs = {"query", "key", *inspect.signature(causal_mask).parameters, "scale", "softcap", "config", "return_stats"}
    assert knobs == set(inspect.signature(MASKS[name]).parameters) - not_knobs


@all_masks
def test_shared_arguments_are_those_of_flexprefill_mask(name):
    shared, own = inspect.signature(causal_mask).parameters, inspect.signature(MASKS[name]).parameters
    assert set(shared) <= set(own)
    for argument, parameter in shared.items():
        assert own[argument] == parameter
        assert own[argument] == inspect.signature(flexprefill_mask).parameters[argument]


@all_masks
def test_mask_mod_carries_the_name(name):
    assert made(name, "whole").mask.mask_mod.__name__.startswith(f"{name}(")


@pytest.mark.parametrize("table", [SPARSE, KEEP_EVERYTHING])
def test_every_mask_is_in_the_tables_of_the_gallery(table):
    assert set(table) == set(MASKS)
