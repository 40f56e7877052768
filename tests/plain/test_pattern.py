"""The Jensen-Shannon distance between estimated and true attention."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flexmask.plain.pattern import jensen_shannon_distance


def literal_distance(estimated, true):
    """The definition in float64, 0 log 0 = 0."""
    total = 0.0
    for a, b in zip(estimated, true, strict=True):
        total += sum(x / 2 * math.log(2 * x / (a + b)) for x in (a, b) if x > 0)
    return math.sqrt(max(0.0, total))


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=40), st.integers(0, 2**31))
def test_is_that_of_the_definition_and_symmetric(weights, seed):
    estimated = torch.tensor([*weights, 1]).double()
    true = torch.rand(len(weights) + 1, generator=torch.Generator().manual_seed(seed)).double() ** 8
    estimated, true = ((x / x.sum()).float() for x in (estimated, true))
    got = jensen_shannon_distance(estimated, true).item()
    assert got**2 == pytest.approx(literal_distance(estimated.tolist(), true.tolist()) ** 2, abs=1e-6)
    assert got == pytest.approx(jensen_shannon_distance(true, estimated).item(), abs=1e-6)


@pytest.mark.parametrize("place", [0, 1])
def test_nan_stays_in_its_head(place):
    shares = [torch.full((3, 4), 0.25), torch.full((3, 4), 0.25)]
    shares[place][1, 2] = float("nan")
    assert jensen_shannon_distance(*shares).isnan().tolist() == [False, True, False]


def test_rounding_does_not_make_the_root_nan():
    shares = torch.softmax(torch.randn(1000, 64, generator=torch.Generator().manual_seed(0)), -1)
    assert (jensen_shannon_distance(shares, shares * (1 + 1e-7)) < 1e-3).all()
