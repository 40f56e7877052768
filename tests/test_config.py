"""Every range of FlexPrefillConfig is checked, and a refusal names argument, expected and got."""

from __future__ import annotations

import dataclasses
import math
import re
from typing import Any

import numpy as np
import pytest
import torch

from flexmask.config import UNSET, FlexPrefillConfig, compile_time, config_from

NUMBER = "{name} must be a number; got {got}"
FINITE = "{name} must be finite; got {got}"
INTEGER = "{name} must be an int; got {got}"
GAMMA = "gamma must be in (0, 1]; got {got}"
TAU = "tau must be in [0, 1]; got {got}"
BLOCK = "block_size must be a multiple of 16 from 16 to 256; got {got}"
FLOOR = "min_budget must be >= 0 tokens; got {got}"
CAP = "max_budget must be at least 1 token and at least min_budget ({floor}); got {got}"
WORDS = "{name} must be one of {words}; got {got!r}"

# keywords, exception, message
NO_CAP = 'selection="hybrid" keeps by thresholds and takes no max_budget; got 2048'
STRIDE = "row_stride must be a divisor of block_size ({size}) and at least a 32nd of it; got {got}"

REFUSED: list[tuple[dict[str, Any], type[Exception], str]] = [
    *(({"gamma": x}, ValueError, GAMMA.format(got=x)) for x in (0, 0.0, -0.1, 1.0000001, 2, 95)),
    *(({"tau": x}, ValueError, TAU.format(got=x)) for x in (-0.1, 1.5, -1, 10)),
    *(({n: x}, ValueError, FINITE.format(name=n, got=x)) for n in ("gamma", "tau") for x in (math.nan, math.inf, -math.inf)),
    *(
        ({n: x}, TypeError, NUMBER.format(name=n, got=type(x).__name__))
        for n in ("gamma", "tau")
        for x in ("0.9", None, True, 0.9j, {0.9}, np.array([0.9]))
    ),
    *(({"tau": x}, TypeError, NUMBER.format(name="tau", got=type(x).__name__)) for x in (torch.tensor(0.1), [0.1], (0.1, 0.2))),
    *(
        (
            {"gamma": torch.full(shape, 0.9)},
            TypeError,
            "gamma must be a number or a sequence of one number a head in a config; got a tensor, "
            "which flexprefill_mask and flexprefill_attention take as a keyword",
        )
        for shape in ((), (2,))
    ),
    ({"gamma": []}, ValueError, "gamma must be a number or hold one number a head; got an empty sequence"),
    ({"gamma": ()}, ValueError, "gamma must be a number or hold one number a head; got an empty sequence"),
    *(
        ({"gamma": [0.5, x]}, ValueError, message.replace("gamma", "gamma[1]").format(name="gamma[1]", got=x))
        for x, message in ((0, GAMMA), (1.1, GAMMA), (-1.0, GAMMA), (math.nan, FINITE), (math.inf, FINITE))
    ),
    *(
        ({"gamma": (x, 0.5)}, TypeError, NUMBER.format(name="gamma[0]", got=type(x).__name__))
        for x in ("0.9", None, True, (0.9,), torch.tensor(0.9))
    ),
    *(({"block_size": x}, ValueError, BLOCK.format(got=x)) for x in (0, -16, 8, 15, 17, 100, 272, 512)),
    *(
        ({n: x}, TypeError, INTEGER.format(name=n, got=type(x).__name__))
        for n in ("block_size", "min_budget", "max_budget")
        for x in (64.0, "64", True, np.int64(64), torch.tensor(64), (64, 64))
    ),
    ({"block_size": None}, TypeError, INTEGER.format(name="block_size", got="NoneType")),
    ({"min_budget": None}, TypeError, INTEGER.format(name="min_budget", got="NoneType")),
    ({"min_budget": -1}, ValueError, FLOOR.format(got=-1)),
    *(({n: 10**25}, ValueError, f"{n} must be < 2**63 tokens; got {10**25}") for n in ("min_budget", "max_budget")),
    ({"max_budget": 0, "min_budget": 0}, ValueError, CAP.format(floor=0, got=0)),
    ({"max_budget": -5, "min_budget": 0}, ValueError, CAP.format(floor=0, got=-5)),
    ({"max_budget": 1023}, ValueError, CAP.format(floor=1024, got=1023)),
    ({"max_budget": 63, "min_budget": 64}, ValueError, CAP.format(floor=64, got=63)),
    *(
        ({n: x}, ValueError, WORDS.format(name=n, words=words, got=x))
        for n, words in (
            ("selection", "'coverage', 'hybrid', 'reference'"),
            ("query_aware", "'flatten', 'per_query'"),
            ("pattern_queries", "'last', 'middle'"),
            ("index_queries", "'last', 'middle'"),
        )
        for x in ("", "Last", None, 1, ["last"])
    ),
    *(({"row_stride": x}, ValueError, STRIDE.format(size=128, got=x)) for x in (0, -8, 3, 2, 256)),
    ({"row_stride": 4, "block_size": 256}, ValueError, STRIDE.format(size=256, got=4)),
    ({"row_stride": 8.0}, TypeError, INTEGER.format(name="row_stride", got="float")),
    ({"selection": "hybrid", "max_budget": 2048}, ValueError, NO_CAP),
]


@pytest.mark.parametrize(("keywords", "error", "message"), REFUSED, ids=[str(keywords) for keywords, *_ in REFUSED])
def test_wrong_value_is_refused_by_name(keywords, error, message):
    with pytest.raises(error, match=f"^{re.escape(message)}$"):
        FlexPrefillConfig(**keywords)


@pytest.mark.parametrize(
    "keywords",
    [
        *({"gamma": x} for x in (1e-9, 0.5, 1, 1.0, (0.5,), (1e-9, 1), (0.5,) * 128)),
        *({"tau": x} for x in (0, 0.0, 0.1, 1, 1.0)),
        *({"block_size": x} for x in range(16, 257, 16)),
        *({"min_budget": x} for x in (0, 1, 10**9, 2**63 - 1)),
        {"max_budget": 1, "min_budget": 0},
        {"max_budget": 1024},
        {"max_budget": 10**9},
        {"selection": "reference"},
        {"selection": "hybrid"},
        *({"block_size": size, "row_stride": stride} for size, stride in ((16, 1), (48, 3), (128, 4), (256, 8), (256, 256))),
        {"query_aware": "per_query"},
        {"pattern_queries": "middle", "index_queries": "middle"},
    ],
    ids=str,
)
def test_ends_of_the_ranges_are_accepted(keywords):
    config = FlexPrefillConfig(**keywords)
    assert {name: getattr(config, name) for name in keywords} == keywords


def test_defaults_are_those_of_the_paper():
    assert dataclasses.asdict(FlexPrefillConfig()) == {
        "gamma": 0.95,
        "tau": 0.1,
        "block_size": 128,
        "min_budget": 1024,
        "max_budget": None,
        "selection": "coverage",
        "query_aware": "flatten",
        "pattern_queries": "last",
        "index_queries": "last",
        "row_stride": 8,
    }


def test_gammas_by_head_are_kept_as_a_tuple():
    given = [0.5, 0.75]
    config = FlexPrefillConfig(gamma=given)
    given[0] = 7
    assert config.gamma == (0.5, 0.75)
    assert config == FlexPrefillConfig(gamma=(0.5, 0.75)) != FlexPrefillConfig(gamma=(0.75, 0.5))
    assert len({config, FlexPrefillConfig(gamma=(0.5, 0.75)), FlexPrefillConfig(gamma=0.5)}) == 2


def test_gamma_is_not_compiled_for():
    assert compile_time(FlexPrefillConfig(gamma=[0.5, 1.0])) == compile_time(FlexPrefillConfig(gamma=1.0, tau=0.3))
    assert compile_time(FlexPrefillConfig(tau=0)) != compile_time(FlexPrefillConfig(tau=0.3))


def test_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        FlexPrefillConfig().gamma = 0.5


def test_a_changed_copy_is_checked():
    with pytest.raises(ValueError, match="gamma must be in"):
        dataclasses.replace(FlexPrefillConfig(), gamma=2)


def test_equal_options_are_equal_and_hash_alike():
    assert FlexPrefillConfig(gamma=0.9) == FlexPrefillConfig(gamma=0.9)
    assert len({FlexPrefillConfig(gamma=0.9), FlexPrefillConfig(gamma=0.9), FlexPrefillConfig()}) == 2


@pytest.mark.parametrize(
    ("tokens", "block_size", "blocks"), [(0, 128, 0), (1, 128, 1), (128, 128, 1), (129, 128, 2), (1024, 48, 22)]
)
def test_floor_in_blocks_is_rounded_up(tokens, block_size, blocks):
    assert FlexPrefillConfig(min_budget=tokens, block_size=block_size).min_blocks == blocks


@pytest.mark.parametrize(("tokens", "blocks"), [(None, None), (1, 1), (16, 1), (17, 2)])
def test_cap_in_blocks_is_rounded_up(tokens, blocks):
    assert FlexPrefillConfig(min_budget=0, max_budget=tokens, block_size=16).max_blocks == blocks


# A config instead of its keywords

DEFAULTS = dataclasses.asdict(FlexPrefillConfig())


FIXED = {name: value for name, value in DEFAULTS.items() if name not in ("gamma", "tau")}


def keywords(config, gamma=UNSET, tau=UNSET, **options):
    """Call config_from as the public functions do."""
    return config_from(config, gamma, tau, options)


def test_config_is_taken_as_it_is():
    config = FlexPrefillConfig(gamma=0.5, block_size=32)
    assert config_from(config, UNSET, UNSET, {}) is config


def test_keywords_make_a_config():
    assert config_from(None, 0.5, UNSET, {**FIXED}) == FlexPrefillConfig(gamma=0.5)


def test_a_tensor_of_gammas_travels_beside_the_config():
    assert config_from(None, torch.tensor([0.5, 0.7]), 0.3, {"block_size": 32}) == FlexPrefillConfig(tau=0.3, block_size=32)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("gamma", torch.tensor([0.5])),
        ("gamma", 0.95),  # its default, but said
        ("tau", 0.0),
        ("block_size", 64),
        ("min_budget", 0),
        ("max_budget", 2048),
        ("selection", "reference"),
        ("query_aware", "per_query"),
        ("pattern_queries", "middle"),
        ("index_queries", "middle"),
    ],
)
def test_config_excludes_each_of_its_keywords(name, value):
    with pytest.raises(ValueError, match=f"^config excludes the keywords that it holds; got config and {name}$"):
        keywords(FlexPrefillConfig(), **{name: value})


def test_all_excluded_keywords_are_named():
    with pytest.raises(ValueError, match=r"got config and min_budget, gamma$"):
        keywords(FlexPrefillConfig(), gamma=0.5, min_budget=0)


@pytest.mark.parametrize("config", [{"gamma": 0.9}, 0.9, FlexPrefillConfig], ids=["dict", "number", "class"])
def test_config_of_another_type_is_refused(config):
    with pytest.raises(TypeError, match=f"^config must be a FlexPrefillConfig; got {type(config).__name__}$"):
        keywords(config)
