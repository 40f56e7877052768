"""Options of the methods: ranges and refusals, NumPy's numbers for Python's, and how a method is named."""

import functools
import json
import math
import re
from collections import UserList

import numpy as np
import pytest
import torch

from flexmask import METHODS, flexprefill_mask, hybrid_mask, sparse_attention, sparse_attention_varlen
from flexmask.base.checks import plain_numbers
from flexmask.base.inputs import attention_inputs
from flexmask.method import method_of
from flexmask.settings import PrefillSettings
from tests.refusals import Refusals, refused_values

NUMBER = "{name} must be a number; got {type}"
FINITE = "{name} must be finite; got {got}"
INTEGER = "{name} must be an int; got {type}"
WORD = "{name} must be one of %s; got {got!r}"
GAMMA = "gamma must be in (0, 1]; got {got}"
CAP = "max_budget must be at least 1 token and at least min_budget ({least}); got {got}"
STRIDE = "row_stride must be a divisor of block_size ({size}) and at least a 32nd of it; got {got}"
OTHERS = "method '{method}' takes the options {own}; got {name!r}, an option of {others}"


def by_head(error, message, value):
    """A wrong number of the second of two heads."""
    return refused_values(error, message.replace("gamma", "gamma[1]").replace("{name}", "gamma[1]"), ("gamma",), [value])[0][1:]


def of_another(method, name, others):
    own = ", ".join(METHODS[method].defaults)
    return {name: 8}, TypeError, OTHERS.format(method=method, own=own, name=name, others=others)


INFINITE = (math.nan, math.inf, -math.inf)
TOKENS = ("min_budget", "max_budget")
WORDS = ("", "Last", None, 1, ["last"])
REFUSED_BY: dict[str, Refusals] = {
    "published": [
        *refused_values(ValueError, GAMMA, ("gamma",), (0, 1.0000001)),
        *refused_values(ValueError, "tau must be in [0, 1]; got {got}", ("tau",), (-0.1, 1.5)),
        ({"max_budget": 1023}, ValueError, CAP.format(least=1024, got=1023)),
    ],
    "flexprefill": [
        *refused_values(ValueError, GAMMA, ("gamma",), (0, -0.1, 1.0000001, 95)),
        *refused_values(ValueError, "tau must be in [0, 1]; got {got}", ("tau",), (-0.1, 1.5)),
        *refused_values(ValueError, FINITE, ("gamma", "tau"), INFINITE),
        *refused_values(TypeError, NUMBER, ("gamma", "tau"), ("0.9", None, True, np.bool_(True), 0.9j, {0.9})),
        *refused_values(TypeError, NUMBER, ("tau",), (torch.tensor(0.1), [0.1], (0.1, 0.2), np.array([0.1]))),
        *refused_values(
            TypeError, INTEGER, ("block_size", *TOKENS), (64.0, "64", True, np.array([64]), torch.tensor(64), (64, 64))
        ),
        *refused_values(TypeError, INTEGER, ("block_size", "min_budget"), (None,)),
        *refused_values(ValueError, "{name} must be < 2**63 tokens; got {got}", TOKENS, (10**25,)),
        ({"max_budget": 0, "min_budget": 0}, ValueError, CAP.format(least=0, got=0)),
        ({"max_budget": 63, "min_budget": 64}, ValueError, CAP.format(least=64, got=63)),
        *refused_values(ValueError, WORD % "'flatten', 'per_query'", ("query_aware",), WORDS),
        *refused_values(ValueError, WORD % "'last', 'middle'", ("pattern_queries", "index_queries"), WORDS),
        of_another("flexprefill", "row_stride", "hybrid"),
    ],
    "hybrid": [
        *refused_values(ValueError, GAMMA, ("gamma",), (0, -0.1, 1.0000001, 95)),
        ({"gamma": []}, ValueError, "gamma must be a number or hold one number per head; got an empty sequence"),
        *(({"gamma": [0.5, x]}, *by_head(ValueError, GAMMA, x)) for x in (0, 1.1)),
        *(({"gamma": [0.5, x]}, *by_head(ValueError, FINITE, x)) for x in (math.nan, math.inf)),
        *(({"gamma": [0.5, x]}, *by_head(TypeError, NUMBER, x)) for x in ("0.9", None, True, (0.9,), torch.tensor(0.9))),
        *refused_values(ValueError, STRIDE.replace("{size}", "128"), ("row_stride",), (0, -8, 3, 2, 256)),
        ({"row_stride": 4, "block_size": 256}, ValueError, STRIDE.format(size=256, got=4)),
        ({"row_stride": 1, "block_size": 48}, ValueError, STRIDE.format(size=48, got=1)),
        *refused_values(ValueError, "min_coverage must be in [0, 1]; got {got}", ("min_coverage",), (-0.1, 1.5)),
        *refused_values(TypeError, INTEGER, ("row_stride",), (8.0,)),
        *refused_values(TypeError, "{name} must be True or False; got {got!r}", ("last_rows_dense",), ("true", 1, 0.0, None)),
        of_another("hybrid", "max_budget", "flexprefill, published"),
    ],
    "causal": refused_values(
        ValueError, "block_size must be a multiple of 16 from 16 to 256; got {got}", ("block_size",), (0, -16, 8, 17, 100, 272)
    ),
}
REFUSED = [(method, *each) for method, refusals in REFUSED_BY.items() for each in refusals]


@pytest.mark.parametrize(("method", "options", "error", "message"), REFUSED, ids=[f"{m} {given}" for m, given, *_ in REFUSED])
def test_wrong_value_is_refused_by_name(method, options, error, message):
    given = dict(options)
    with pytest.raises(error, match=f"^{re.escape(message)}$"):
        method_of(method, given.pop("block_size", 128), given)


@pytest.mark.parametrize(
    ("method", "options"),
    [
        *(("hybrid", {"gamma": x}) for x in (1e-9, 1, 1.0, (1e-9, 1), (0.5,) * 128)),
        *(("flexprefill", {"tau": x}) for x in (0, 0.0, 1, 1.0)),
        *(("causal", {"block_size": x}) for x in range(16, 257, 16)),
        *(("hybrid", {"min_budget": x}) for x in (0, 1, 2**63 - 1)),
        *(("hybrid", {"last_rows_dense": x}) for x in (True, False)),
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
    chosen = method_of(method, given.pop("block_size", 128), given)
    assert {name: chosen.options[name] for name in given} == given


def test_numbers_by_head_are_copied_and_compared_with_the_heads():
    given = [0.5, 0.75]
    chosen = method_of("hybrid", 128, {"gamma": given})
    given[0] = 7
    assert chosen.options["gamma"] == (0.5, 0.75)
    query, key = torch.zeros(1, 4, 32, 16), torch.zeros(1, 2, 32, 16)
    with pytest.raises(ValueError, match="gamma must hold one number for each of query's 4 heads; got 2 numbers"):
        chosen.for_inputs(attention_inputs(query, key))
    assert chosen.for_inputs(attention_inputs(query[:, :2], key)).options["gamma"] == (0.5, 0.75)


@pytest.mark.parametrize("method", ["hybrid", "flexprefill"])
def test_only_a_gamma_of_one_keeps_every_block(method):
    inputs = attention_inputs(torch.zeros(1, 4, 32, 16), torch.zeros(1, 2, 32, 16))
    by_head = method_of(method, 128, {"gamma": (1 - 1e-9, 1, 0.99, 1.0)}).for_inputs(inputs)
    assert by_head.keeps_every_block_by_head(4) == [False, True, False, True]
    assert method_of(method, 128, {"gamma": 1 - 1e-9}).keeps_every_block_by_head(4) == [False] * 4


def test_a_method_is_named_by_its_name_its_mask_function_or_a_partial_of_it():
    expected = method_of("flexprefill", 64, {"gamma": 0.5, "tau": 0.2})
    half = functools.partial(flexprefill_mask, gamma=0.5, tau=0.7)
    for named, options in (
        (flexprefill_mask, {"gamma": 0.5, "tau": 0.2}),
        (half, {"tau": 0.2}),
        (functools.partial(half, tau=0.2), {}),
    ):
        found = method_of(named, 64, options)
        assert type(found) is type(expected) and vars(found) == vars(expected)
    with pytest.raises(ValueError, match="gamma must be in"):
        method_of(functools.partial(flexprefill_mask, gamma=2), 64, {})
    users = method_of(lambda query, key, **given: None, 64, {"anything": 1})
    assert users.is_user_method and users.options == {"anything": 1}


@pytest.mark.parametrize(
    ("function", "options", "why"),
    [
        (max, {}, "got one with "),  # Python 3.11 finds no signature
        (lambda query, key: None, {}, r"got one with \(query, key\): got an unexpected keyword argument 'block_size'"),
        (lambda query, key, *, block_size, **_: None, {"query": 1}, "multiple values for argument 'query'"),
        (lambda query, **_: None, {}, "too many positional arguments"),
        (lambda query, key, block_size, window, attention_mask, q_offset: None, {"gamma": 1}, "keyword argument 'gamma'"),
    ],
)
def test_a_function_that_cannot_be_called_is_refused_with_the_contract(function, options, why):
    contract = f"^method {function.__name__} must be a function of query and key that takes the keywords block_size, window, "
    with pytest.raises(TypeError, match=f"{contract}attention_mask, q_offset.* and returns a BlockMask; .*{why}"):
        method_of(function, 32, options)


@pytest.mark.parametrize("named", ["coverage", "reference", "", None, 3, ["hybrid"]])
def test_an_unknown_method_is_refused(named):
    with pytest.raises(ValueError, match=rf"^method must be one of 'causal', .*'hybrid'.*; got {re.escape(repr(named))}$"):
        method_of(named, 128, {})


NUMPY = {
    "gamma": np.float32(0.5), "block_size": np.int64(32), "min_budget": np.int32(32), "row_stride": np.uint8(4),
    "window": np.int64(100), "q_offset": np.int64(64), "scale": np.float16(0.5),
}  # fmt: skip
OPTIONS, BY_HEAD = {name: number.item() for name, number in NUMPY.items()}, [0.5, 0.6, 0.7, 0.9]
SEQUENCES = [np.array(BY_HEAD), [np.float32(0.5), 0.6, 0.7, np.float64(0.9)], UserList(BY_HEAD)]


def query_and_key():
    generator = torch.Generator().manual_seed(0)
    return torch.randn(1, 4, 128, 32, generator=generator), torch.randn(1, 2, 192, 32, generator=generator)


@pytest.mark.parametrize(
    ("given", "plain"), [*(({name: NUMPY[name]}, {}) for name in NUMPY), *(({"gamma": x}, {"gamma": BY_HEAD}) for x in SEQUENCES)]
)
def test_numpys_numbers_and_sequences_by_head_give_the_same_mask(given, plain):
    query, key = query_and_key()
    found, expected = (hybrid_mask(query, key, **OPTIONS | options).to_dense() for options in (given, plain))
    assert torch.equal(found, expected)


def test_every_public_call_takes_numpy_numbers():
    query, key = query_and_key()
    sparse_attention(query, key, key, **NUMPY, dense_below=np.int64(1000), max_mask_bytes=np.int64(2**20))
    rows, keys, bounds = query[0].transpose(0, 1), key[0, :, :128].transpose(0, 1), np.array([0, 50, 128])
    given = (rows, keys, keys)
    expected = sparse_attention_varlen(*given, [0, 50, 128], [0, 50, 128], dense_below=1000)
    found = sparse_attention_varlen(*given, bounds, bounds, max_seqlen_q=np.int64(78), dense_below=np.int32(1000))
    assert torch.equal(found, expected)


def test_settings_with_numpy_numbers_are_those_with_pythons_and_can_be_saved():
    given = {"gamma": np.array([0.5, 1.0]), "block_size": np.int64(32), "dense_below": np.int32(0)}
    found = PrefillSettings(layers={np.int64(3): {"gamma": np.float32(0.75)}}, dense_layers=np.array([1, 2]), **given)
    written = PrefillSettings(
        layers={3: {"gamma": 0.75}}, dense_layers=(1, 2), gamma=[0.5, 1.0], block_size=32, dense_below=0
    ).to_dict()
    assert json.dumps(found.to_dict()) == json.dumps(written)


def test_numpy_values_of_the_wrong_shape_or_type_are_refused():
    assert plain_numbers(np.array([[1, 2], [3, 4]])) == ((1, 2), (3, 4))
    query, key = query_and_key()
    for gamma, said in ((np.array([0.5, 0.5]), "4 heads; got 2 numbers"), (np.array(["a"] * 4), r"gamma\[0\] must be a number")):
        with pytest.raises((TypeError, ValueError), match=said):
            hybrid_mask(query, key, gamma=gamma)
    with pytest.raises(TypeError, match="window must be an int; got float"):
        hybrid_mask(query, key, window=np.float32(64))


@pytest.mark.parametrize("name", ["mask_mod", "score_mod", "block_mask", "attn_mask"])
def test_a_mask_of_the_users_is_refused_with_the_way_to_pass_it(name):
    query = torch.zeros(1, 2, 64, 16)
    with pytest.raises(TypeError, match=rf"got '{name}' .*pass method=f: .* returns a BlockMask with your mask_mod"):
        sparse_attention(query, query, query, **{name: None})
    with pytest.raises(TypeError) as other:
        sparse_attention(query, query, query, gama=0.9)
    assert "pass method=f" not in str(other.value)
