"""The oracle's decision margins: running sum, gap, underflow."""

import itertools
import math
from typing import Any

import pytest
import torch

from tests.oracle.by_hand import BLOCK, decide, random_inputs
from tests.oracle.margins import top_p_margin
from tests.oracle.reference import reference
from tests.oracle.steps import Budget


def row_with_block_shares(*shares):
    """Scores of the last row that spread each share evenly over its key block."""
    return torch.tensor([math.log(share / BLOCK) for share in shares for _ in range(BLOCK)])[None]


def test_gap_of_values_that_are_rounded_coarsely():
    values, budget = {0: 0.9, 1: 3e-9, 2: 2e-9}, Budget(gamma=0.5, floor=2)
    assert top_p_margin(values, budget) == pytest.approx(1 / 3)
    assert top_p_margin(values, budget, coarse=0.01) == pytest.approx(1e-7)


def test_margin_of_running_sum_and_gap():
    def margin(gamma, **options):
        result = decide(row_with_block_shares(0.5, 0.3, 0.2), gamma=gamma, **options)
        return result.vertical_margin.item()

    # .5 is a sixth below .6; .8 is a third above it, and so is .3 relative to .2.
    assert margin(0.6) == pytest.approx(1 / 6)
    # .8 is just above .79.
    assert margin(0.79) == pytest.approx(0.01 / 0.79)
    # A floor of 2 takes .3 before .2 whatever the running sum; .8 is far above .4.
    assert margin(0.4, min_budget=2 * BLOCK) == pytest.approx(1 / 3)
    # A cap of 1: .5 stays far below .9; the gap from .5 to .3 is two fifths.
    assert margin(0.9, max_budget=BLOCK) == pytest.approx(0.4)
    assert margin(1.0) == math.inf


def test_margin_is_zero_where_float32_underflows():
    # Shares of exp(-87) and exp(-92) after the first block: float32 may not tell them apart.
    scores = row_with_block_shares(1.0, math.exp(-87), math.exp(-92))
    assert decide(scores, min_budget=2 * BLOCK).vertical_margin.item() == 0.0
    scores = row_with_block_shares(1.0, math.exp(-60), math.exp(-61))
    result = decide(scores, min_budget=2 * BLOCK)
    assert result.vertical_margin.item() == pytest.approx(0.1 / 0.9)


def test_margin_is_the_smallest_that_matters():
    query, key = random_inputs(12, 112, 112, num_heads=8)
    options: dict[str, Any] = {"gamma": 0.7, "block_size": BLOCK, "min_budget": BLOCK}
    for tau, method in itertools.product((0.1, 1.0), ("flexprefill", "published")):
        result = reference(query, key, method, tau=tau, **options)
        assert result.is_query_aware.all() == (tau == 1.0)
        lines_margin = result.vertical_margin.minimum(result.slash_margin)
        expected = result.pattern_margin.minimum(lines_margin)
        both = expected.minimum(result.query_aware_margin)
        assert torch.equal(result.margin, torch.where(result.is_query_aware, both, expected))
