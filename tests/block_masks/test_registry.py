"""The table of methods, exports, files, README and signatures agree."""

import inspect
import re
from pathlib import Path

import flexmask
from flexmask import METHODS, block_masks
from tests.block_masks.definitions import TESTED
from tests.block_masks.gallery import MASKS, all_masks, made

FOLDER = Path(__file__).resolve().parents[2] / "block_masks"


# one file holds several
BY_POSITION = ("causal", "lm_infinite", "moa", "streaming_llm", "tri_shape")


def test_table_exports_and_files_agree():
    names = {
        path.name.removesuffix(".py") for path in FOLDER.iterdir() if path.suffix == ".py" or (path / "__init__.py").is_file()
    }
    assert set(MASKS) - set(BY_POSITION) == names - {"__init__", "positions"}
    assert {name for name, mask in MASKS.items() if mask.__module__ == "flexmask.block_masks.positions"} == set(BY_POSITION)
    # other tests enter methods of their own
    assert set(MASKS) <= set(METHODS)
    for name, function in MASKS.items():
        assert function.__name__ == f"{name}_mask"
        assert function.method is METHODS[name]
    for name in ("flexprefill_mask", "hybrid_mask"):
        assert getattr(flexmask, name) is getattr(block_masks, name)


def test_table_and_readme_agree():
    rows = re.findall(r"^\| \[`(\w+)`\]\(([\w/]+\.py)\) \|", (FOLDER / "README.md").read_text(encoding="utf-8"), re.MULTILINE)
    files = {name: f"{name}/__init__.py" if (FOLDER / name).is_dir() else f"{name}.py" for name in sorted(MASKS)}
    files |= dict.fromkeys(BY_POSITION, "positions.py")
    assert rows == [(f"{name}_mask", file) for name, file in files.items()]


@all_masks
def test_readme_table_names_every_knob(name):
    row = re.search(rf"^\| \[`{name}_mask`\].*$", (FOLDER / "README.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert row is not None
    assert re.findall(r"`(\w+)`", row.group().rsplit(" | ", 1)[1]) == list(METHODS[name].defaults)


@all_masks
def test_shared_arguments_are_those_of_every_mask(name):
    shared, own = (inspect.signature(MASKS[each]).parameters for each in ("causal", name))
    assert {argument: own[argument] for argument in shared} == dict(shared)
    assert set(own) - set(shared) == set(METHODS[name].defaults)


@all_masks
def test_mask_mod_carries_the_name(name):
    assert made(name, "whole").mask.mask_mod.__name__.startswith(f"{name}(")


def test_every_method_has_a_definition_or_an_oracle():
    assert set(TESTED) == set(MASKS)
    assert {name for name, tested in TESTED.items() if tested.definition is None} == {"flexprefill", "hybrid", "published"}
