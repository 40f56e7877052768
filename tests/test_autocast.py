"""Under autocast every public call takes query, key and value in its dtype, as SDPA does, and computes without it."""

import contextlib
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from flexmask import flexprefill_mask, sparse_attention, warmup
from tests.compile_support import counting as counting
from tests.compile_support import lists_of, traced
from tests.public_calls import COMPILED, OPTIONS, UNCOMPILED, assert_same_results, attention, inputs, tensors_of

LOWER = (torch.bfloat16, torch.float16)
lower = pytest.mark.parametrize("dtype", LOWER, ids=str)


def users_method(query, key, **options):
    assert not torch.is_autocast_enabled("cpu")
    return flexprefill_mask(query, key, gamma=0.6, min_budget=0, **options)


SPARSE_CALLS = {
    **{name: COMPILED[name] for name in ("sparse, statistics", "packed", "engines: a prompt")},
    "a user's method": lambda query, key, value: sparse_attention(query, key, value, users_method, block_size=32, dense_below=0),
}


def assert_follows(call: Any, dtype: torch.dtype) -> None:
    query, key, value = inputs()
    other = next(each for each in LOWER if each != dtype)
    for given in ((query, key, value), (query, key.to(dtype), value.to(other))):
        expected = call(*(x.to(dtype) for x in given))
        with torch.autocast("cpu", dtype):
            assert_same_results({"": tensors_of(call(*given))}, {"": tensors_of(expected)})


@lower
@pytest.mark.parametrize("call", UNCOMPILED.values(), ids=UNCOMPILED)
def test_masks_and_dense_attention_follow_autocast(call, dtype):
    assert_follows(call, dtype)


@pytest.mark.attention
@pytest.mark.parametrize("call", SPARSE_CALLS.values(), ids=SPARSE_CALLS)
def test_sparse_attention_follows_autocast(call):
    with torch.no_grad():
        assert_follows(call, torch.bfloat16)


def test_a_warm_up_under_autocast_serves_calls_under_autocast(counting):
    query, key, value = inputs()
    with torch.autocast("cpu", torch.bfloat16):
        warmup(4, 2, 16, dtype=torch.float32, device="cpu", **OPTIONS)
        graphs = counting.frame_count
        attention(query, key, value.bfloat16())
    assert counting.frame_count == graphs > 0


@pytest.mark.parametrize("outside", ["cpu", "cuda"])
def test_other_dtypes_are_refused_where_autocast_is_off_or_of_another_device(outside):
    query, key, value = inputs()
    is_on = outside == "cpu" or torch.cuda.is_available()
    with torch.autocast(outside, torch.bfloat16, enabled=is_on), torch.autocast("cpu", enabled=False):
        with pytest.raises(TypeError, match=r"value must have query's dtype torch\.float32; got torch\.bfloat16"):
            sparse_attention(query, key, value.bfloat16())
        with pytest.raises(TypeError, match=r"key must have query's dtype torch\.float32; got torch\.bfloat16"):
            flexprefill_mask(query, key.bfloat16())


@pytest.mark.parametrize("dtype", [torch.float64, torch.int32], ids=str)
def test_dtypes_that_autocast_does_not_cast_are_refused_under_autocast(dtype):
    query, key, value = (x.to(dtype) for x in inputs())
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(TypeError, match=f"query must be float32.* got {dtype}"):
        sparse_attention(query, key, value)


def test_gradients_pass_the_cast():
    given = [x.clone().requires_grad_() for x in inputs()]
    with torch.autocast("cpu", torch.bfloat16):
        out = sparse_attention(*given)
        expected = F.scaled_dot_product_attention(*given, is_causal=True, enable_gqa=True)
    assert out.dtype == expected.dtype == torch.bfloat16
    ours, plain = (torch.autograd.grad(each.float().square().sum(), given) for each in (out, expected))
    assert all(x.dtype == torch.float32 and torch.equal(x, y) for x, y in zip(ours, plain, strict=True))


@pytest.mark.parametrize("outside", [True, False], ids=["compiled under autocast", "autocast within"])
def test_traced_calls_follow_autocast(outside):
    given = inputs(300, 32)
    halves = [x.bfloat16() for x in given]
    lists, dense = lists_of(flexprefill_mask(*halves[:2], **OPTIONS)), sparse_attention(*halves)

    def under_autocast(call):
        with contextlib.nullcontext() if outside else torch.autocast("cpu", torch.bfloat16):
            return call()

    run, counter = traced(lambda query, key: under_autocast(lambda: lists_of(flexprefill_mask(query, key, **OPTIONS))))
    attend_dense, _ = traced(lambda query, key, value: under_autocast(lambda: sparse_attention(query, key, value.bfloat16())))
    with torch.autocast("cpu", torch.bfloat16) if outside else contextlib.nullcontext():
        found, *_ = [run(*(x[:, :, :n].clone() for x in given[:2])) for n in (300, 200, 150, 100)]
        assert torch.equal(attend_dense(*given), dense)
    assert all(torch.equal(*pair) for pair in zip(found, lists, strict=True))
    assert counter.frame_count <= 2
