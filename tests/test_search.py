"""The fast path against the reference, and the guarantees of the selection in float64."""

import pytest
from hypothesis import given, settings

from tests.attention_calls import call
from tests.cases import cases, sparse_cases
from tests.comparisons import Drawn, Tally, assert_as_the_oracle

# float64 sums of the reference's shares against float32 decisions
ROUNDING = 1e-5


def compare(case, tally):
    expected = case.reference()
    assert_as_the_oracle(case.search(), expected, tally)
    return expected


def test_equals_the_reference():
    tally = Tally()

    @settings(max_examples=120)
    @given(cases())
    def run(case):
        compare(case, tally)

    run()
    tally.check()


def test_equals_the_reference_where_blocks_are_dropped():
    tally, drawn = Tally(), Drawn()

    @settings(max_examples=50)
    @given(sparse_cases())
    def run(case):
        drawn.add(compare(case, tally))

    run()
    tally.check()
    drawn.check()


@pytest.mark.parametrize("method", ["flexprefill", "hybrid"])
def test_every_window_around_the_edges_of_blocks_equals_the_reference(method):
    for window in range(30, 52):
        case = call(q_len=91, kv_len=139, heads=(2, 1), scores={"window": window}, method=method, tau=0.5, row_stride=4).case
        assert_as_the_oracle(case.search(), case.reference())


# What gamma promises


def test_vertical_slash_head_holds_gamma_of_its_rows_attention():
    least = []

    @settings(max_examples=40)
    @given(sparse_cases(tau=0.0))
    def run(case):
        coverage = case.search().stats.coverage
        assert (coverage >= case.gammas - ROUNDING).all()
        least.append(coverage.min().item())

    run()
    assert min(least) < 0.95
