"""Options of the methods: ranges and refusals, and how a method is named."""

import functools
import math
import re
from typing import Any

import numpy as np
import pytest
import torch

from flexmask import METHODS, flexprefill_mask
from flexmask.base.inputs import attention_inputs
from flexmask.selector import selector_of

NUMBER = "{name} must be a number; got {got}"
FINITE = "{name} must be finite; got {got}"
INTEGER = "{name} must be an int; got {got}"
GAMMA = "gamma must be in (0, 1]; got {got}"
CAP = "max_budget must be at least 1 token and at least min_budget ({floor}); got {got}"
STRIDE = "row_stride must be a divisor of block_size ({size}) and at least a 32nd of it; got {got}"

# method, keywords, exception, message
REFUSED: list[tuple[str, dict[str, Any], type[Exception], str]] = [
    *(
        (method, {"gamma": x}, ValueError, GAMMA.format(got=x))
        for method in ("flexprefill", "hybrid", "published")
        for x in (0, -0.1, 1.0000001, 95)
    ),
    *(
        (method, {"tau": x}, ValueError, f"tau must be in [0, 1]; got {x}")
        for method in ("flexprefill", "published")
        for x in (-0.1, 1.5)
    ),
    *(
        ("flexprefill", {n: x}, ValueError, FINITE.format(name=n, got=x))
        for n in ("gamma", "tau")
        for x in (math.nan, math.inf, -math.inf)
    ),
    *(
        ("flexprefill", {n: x}, TypeError, NUMBER.format(name=n, got=type(x).__name__))
        for n in ("gamma", "tau")
        for x in ("0.9", None, True, np.bool_(True), 0.9j, {0.9})
    ),
    *(
        ("flexprefill", {"tau": x}, TypeError, NUMBER.format(name="tau", got=type(x).__name__))
        for x in (torch.tensor(0.1), [0.1], (0.1, 0.2), np.array([0.1]))
    ),
    ("hybrid", {"gamma": []}, ValueError, "gamma must be a number or hold one number per head; got an empty sequence"),
    *(
        ("hybrid", {"gamma": [0.5, x]}, ValueError, message.replace("gamma", "gamma[1]").format(name="gamma[1]", got=x))
        for x, message in ((0, GAMMA), (1.1, GAMMA), (math.nan, FINITE), (math.inf, FINITE))
    ),
    *(
        ("hybrid", {"gamma": (x, 0.5)}, TypeError, NUMBER.format(name="gamma[0]", got=type(x).__name__))
        for x in ("0.9", None, True, (0.9,), torch.tensor(0.9))
    ),
    *(
        ("causal", {"block_size": x}, ValueError, f"block_size must be a multiple of 16 from 16 to 256; got {x}")
        for x in (0, -16, 8, 17, 100, 272)
    ),
    *(
        ("flexprefill", {n: x}, TypeError, INTEGER.format(name=n, got=type(x).__name__))
        for n in ("block_size", "min_budget", "max_budget")
        for x in (64.0, "64", True, np.array([64]), torch.tensor(64), (64, 64))
    ),
    *(("flexprefill", {n: None}, TypeError, INTEGER.format(name=n, got="NoneType")) for n in ("block_size", "min_budget")),
    ("hybrid", {"min_budget": -1}, ValueError, "min_budget must be >= 0 tokens; got -1"),
    *(
        ("flexprefill", {n: 10**25}, ValueError, f"{n} must be < 2**63 tokens; got {10**25}")
        for n in ("min_budget", "max_budget")
    ),
    ("flexprefill", {"max_budget": 0, "min_budget": 0}, ValueError, CAP.format(floor=0, got=0)),
    ("published", {"max_budget": 1023}, ValueError, CAP.format(floor=1024, got=1023)),
    ("flexprefill", {"max_budget": 63, "min_budget": 64}, ValueError, CAP.format(floor=64, got=63)),
    *(
        ("flexprefill", {n: x}, ValueError, f"{n} must be one of {words}; got {x!r}")
        for n, words in (
            ("query_aware", "'flatten', 'per_query'"),
            ("pattern_queries", "'last', 'middle'"),
            ("index_queries", "'last', 'middle'"),
        )
        for x in ("", "Last", None, 1, ["last"])
    ),
    *(("hybrid", {"row_stride": x}, ValueError, STRIDE.format(size=128, got=x)) for x in (0, -8, 3, 2, 256)),
    ("hybrid", {"row_stride": 4, "block_size": 256}, ValueError, STRIDE.format(size=256, got=4)),
    *(("hybrid", {"min_coverage": x}, ValueError, f"min_coverage must be in [0, 1]; got {x}") for x in (-0.1, 1.5)),
    ("hybrid", {"row_stride": 8.0}, TypeError, INTEGER.format(name="row_stride", got="float")),
    # options of another method
    *(
        (
            method,
            {name: 8},
            TypeError,
            f"method {method!r} takes the options {', '.join(METHODS[method].defaults)}; got {name!r}, an option of {others}",
        )
        for method, name, others in (("hybrid", "max_budget", "flexprefill, published"), ("flexprefill", "row_stride", "hybrid"))
    ),
]


@pytest.mark.parametrize(("method", "options", "error", "message"), REFUSED, ids=[f"{m} {given}" for m, given, *_ in REFUSED])
def test_wrong_value_is_refused_by_name(method, options, error, message):
    given = dict(options)
    with pytest.raises(error, match=f"^{re.escape(message)}$"):
        selector_of(method, given.pop("block_size", 128), given)


@pytest.mark.parametrize(
    ("method", "options"),
    [
        *(("hybrid", {"gamma": x}) for x in (1e-9, 1, 1.0, (1e-9, 1), (0.5,) * 128)),
        *(("flexprefill", {"tau": x}) for x in (0, 0.0, 1, 1.0)),
        *(("causal", {"block_size": x}) for x in range(16, 257, 16)),
        *(("hybrid", {"min_budget": x}) for x in (0, 1, 2**63 - 1)),
        ("flexprefill", {"max_budget": 1, "min_budget": 0}),
        ("flexprefill", {"max_budget": 1024}),
        *(
            ("hybrid", {"block_size": size, "row_stride": stride})
            for size, stride in ((16, 1), (48, 3), (128, 4), (256, 8), (256, 256))
        ),
        ("flexprefill", {"query_aware": "per_query", "pattern_queries": "middle", "index_queries": "middle"}),
    ],
    ids=str,
)
def test_ends_of_the_ranges_are_accepted(method, options):
    given = dict(options)
    selector = selector_of(method, given.pop("block_size", 128), given)
    assert {name: selector.options[name] for name in given} == given


def test_defaults_are_those_of_the_paper():
    budgets = {"gamma": 0.95, "tau": 0.1, "min_budget": 1024, "max_budget": None}
    assert METHODS["published"].defaults == budgets
    words = {"query_aware": "flatten", "pattern_queries": "last", "index_queries": "last"}
    assert METHODS["flexprefill"].defaults == {**budgets, **words}


def test_numbers_by_head_are_copied_and_compared_with_the_heads():
    given = [0.5, 0.75]
    selector = selector_of("hybrid", 128, {"gamma": given})
    given[0] = 7
    assert selector.options["gamma"] == (0.5, 0.75)
    query, key = torch.zeros(1, 4, 32, 16), torch.zeros(1, 2, 32, 16)
    with pytest.raises(ValueError, match="gamma must hold one number for each of query's 4 heads; got 2 numbers"):
        selector.for_inputs(attention_inputs(query, key))
    of_two = selector.for_inputs(attention_inputs(query[:, :2], key))
    assert of_two.keeps_all == [False, False]
    assert selector_of("hybrid", 128, {"gamma": (0.5, 1)}).for_inputs(attention_inputs(query[:, :2], key)).keeps_all == [
        False,
        True,
    ]


def test_a_method_is_named_by_its_name_its_mask_function_or_a_partial_of_it():
    expected = selector_of("flexprefill", 64, {"gamma": 0.5, "tau": 0.2})
    half = functools.partial(flexprefill_mask, gamma=0.5, tau=0.7)
    for named, options in (
        (flexprefill_mask, {"gamma": 0.5, "tau": 0.2}),
        (half, {"tau": 0.2}),
        (functools.partial(half, tau=0.2), {}),
    ):
        found = selector_of(named, 64, options)
        assert (found.method, found.block_size, found.options) == (expected.method, 64, expected.options)
    with pytest.raises(ValueError, match="gamma must be in"):
        selector_of(functools.partial(flexprefill_mask, gamma=2), 64, {})
    users = selector_of(lambda query, key, **given: None, 64, {"anything": 1})
    assert users.method.is_users and users.options == {"anything": 1}


@pytest.mark.parametrize(
    ("function", "options", "why"),
    [
        (lambda query, key: None, {}, r"got one with \(query, key\): got an unexpected keyword argument 'block_size'"),
        (lambda query, key, *, block_size, **_: None, {"query": 1}, "multiple values for argument 'query'"),
        (lambda query, **_: None, {}, "too many positional arguments"),
        (lambda query, key, block_size, window, attention_mask, q_offset: None, {"gamma": 1}, "keyword argument 'gamma'"),
    ],
)
def test_a_function_that_cannot_be_called_is_refused_with_the_contract(function, options, why):
    contract = "^method <lambda> must be a function of query and key that takes the keywords block_size, window, attention_mask, "
    with pytest.raises(TypeError, match=f"{contract}q_offset.* and returns a BlockMask; .*{why}"):
        selector_of(function, 32, options)


@pytest.mark.parametrize("named", ["coverage", "reference", "", None, 3, ["hybrid"]])
def test_a_method_that_is_not_there_is_refused(named):
    with pytest.raises(ValueError, match=rf"^method must be one of 'causal', .*'hybrid'.*; got {re.escape(repr(named))}$"):
        selector_of(named, 128, {})
