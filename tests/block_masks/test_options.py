"""Options of the methods, their docstrings, and the table of methods with its exports, files and README."""

import inspect
import re

import pytest
import torch

import flexmask
from flexmask import METHODS, block_masks
from tests.block_masks.definitions import MASKS, TESTED
from tests.repository import ROOT

INPUTS = torch.zeros(1, 4, 64, 32), torch.zeros(1, 2, 64, 32)
OWN = [name for name in MASKS if name != "causal"]
# published has flexprefill's; hybrid's row_stride is no count
COUNTS = [
    (name, option) for name in OWN for option, default in METHODS[name].defaults.items()
    if type(default) is int and name != "published" and option != "row_stride"
]  # fmt: skip


def described(name, option):
    """Read what a docstring says about an option."""
    text = inspect.getdoc(MASKS[name])
    return re.search(rf"^(?:\w+, )*{option}(?:, \w+)*\n((?: .*\n?)+)", text, re.MULTILINE).group(1)


@pytest.mark.parametrize(("name", "option"), COUNTS)
def test_counts_have_the_least_value_that_the_docstring_states(name, option):
    least = int(re.search(r">= (\d)", described(name, option)).group(1))
    MASKS[name](*INPUTS, **{option: least})
    with pytest.raises(ValueError, match=f"{option} must be >= {least} .*; got {least - 1}"):
        MASKS[name](*INPUTS, **{option: least - 1})
    for wrong in (1.5, True, "2"):
        with pytest.raises(TypeError, match=f"{option} must be an int; got"):
            MASKS[name](*INPUTS, **{option: wrong})


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("xattention", {"threshold": 0}, r"threshold must be in \(0, 1\]; got 0"),
        ("xattention", {"threshold": 1.1}, r"threshold must be in \(0, 1\]; got 1.1"),
        ("xattention", {"stride": 3}, "stride must divide block_size 128; got 3"),
        ("flash_prefill", {"alpha": -0.1}, r"alpha must be in \[0, 1\]; got -0.1"),
        ("flash_prefill", {"alpha": float("nan")}, "alpha must be finite; got nan"),
        ("oracle", {"gamma": 0.0}, r"gamma must be in \(0, 1\]; got 0.0"),
        ("oracle", {"gamma": "1"}, "gamma must be a number; got str"),
        ("sparge", {"similarity_threshold": 1.5}, r"similarity_threshold must be in \[-1, 1\]; got 1.5"),
        ("sparge", {"cdf_threshold": 0}, r"cdf_threshold must be in \(0, 1\]; got 0"),
        ("sparge", {"topk": 0}, r"topk must be in \(0, 1\]; got 0"),
        ("hip", {"query_stride": 3}, "query_stride must divide block_size 128; got 3"),
        ("minference", {"lines": "all"}, "lines must be one of 'pooled', 'covering'; got 'all'"),
        ("minference", {"plan": (1, 2, 3)}, "plan must be a pair .*; got .1, 2, 3. in it"),
        ("minference", {"plan": ((1, 2), (3, 4))}, r"one pair per query head \(4\); got 2 pairs"),
        ("minference", {"plan": ((1, 2, 3),)}, r"got \(1, 2, 3\) in it"),
        ("minference", {"plan": (-1, 2)}, "got -1 in it"),
        ("minference", {"plan": 7}, "plan must be a pair .*; got int"),
        ("minference", {"plan": None}, "plan must be a pair .*; got NoneType"),
        ("moa", {"plan": (1, float("inf"))}, "plan must be finite; got inf"),
        ("causal", {"beta": 1}, "method 'causal' takes no options of its own; got 'beta'$"),
    ],
)
def test_wrong_options_are_refused(name, options, message):
    with pytest.raises((TypeError, ValueError), match=message):
        MASKS[name](*INPUTS, **options)


@pytest.mark.parametrize("name", OWN)
def test_docstring_states_the_defaults_and_the_difference(name):
    text = inspect.getdoc(MASKS[name])
    assert "Source: none" in text or ("Source: " in text and "Differs from the p" in text)
    for option, default in METHODS[name].defaults.items():
        entry = described(name, option)
        if "As in `flexprefill_mask`" in entry:
            assert default == METHODS["flexprefill"].defaults[option]
            continue
        number = r"[Dd]efault\s+(\([^)]*\)|-?\d+(?:\.\d+)?|None|True|False)"
        stated = re.search(number + r"|``\"(\w+)\"``\s+\(default\b|(None)\s+\(default\b", entry)
        assert stated is not None, f"{option} has no default"
        assert str(default) == next(filter(None, stated.groups())), option


FOLDER = ROOT / "block_masks"
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
        assert function.__name__ == f"{name}_mask" and function.method is METHODS[name]
    for name in ("flexprefill_mask", "hybrid_mask"):
        assert getattr(flexmask, name) is getattr(block_masks, name)


def test_table_and_readme_agree():
    rows = re.findall(r"^\| \[`(\w+)`\]\(([\w/]+\.py)\) \|", (FOLDER / "README.md").read_text(encoding="utf-8"), re.MULTILINE)
    files = {name: f"{name}/__init__.py" if (FOLDER / name).is_dir() else f"{name}.py" for name in sorted(MASKS)}
    files |= dict.fromkeys(BY_POSITION, "positions.py")
    assert rows == [(f"{name}_mask", file) for name, file in files.items()]


def test_every_method_has_a_definition_or_an_oracle():
    assert set(TESTED) == set(MASKS)
    assert {name for name, tested in TESTED.items() if tested.definition is None} == {"flexprefill", "hybrid", "published"}
