"""method="hybrid": plain code against the oracle; its thresholds."""

import contextlib
import math
from typing import Any

import pytest
import torch
from hypothesis import strategies as st

from flexmask import hybrid_mask, plain
from flexmask._torch import HAS_TRITON
from flexmask.base.blocks import cut_into_blocks
from flexmask.base.inputs import attention_inputs
from flexmask.block_masks import hybrid
from tests.cases import Case, Config, by_kernels, cases, hybrid_length, hybrid_rule, sparse_cases, structured_inputs
from tests.comparisons import compare_drawn
from tests.compile_support import cut, traced
from tests.compile_support import fresh_compiler as fresh_compiler
from tests.oracle.hybrid import Rule, thresholds
from tests.oracle.visibility import visibility

interpreted = pytest.mark.skipif(torch.cuda.is_available() or not HAS_TRITON, reason="needs Triton's interpreter")
# by what decides them: query rows, the dense query blocks, and the call's geometry
LAST_BLOCKS: dict[str, Any] = {
    "whole blocks": (192, [11], {}),
    "a last block of 8": (200, [11, 12], {}),
    "a chunk inside of a block": (120, [6, 7], {"q_offset": 70}),
    "right padding": (200, [8], {"attention_mask": torch.arange(200)[None] < 144}),
    "left padding": (200, [11, 12], {"attention_mask": torch.arange(200)[None] >= 60}),
    "holes": (200, [9, 11, 12], {"attention_mask": (torch.arange(200)[None] < 156) | (torch.arange(200)[None] >= 190)}),
    "a window": (200, [11, 12], {"window": 140}),
}


def test_equals_the_oracle():
    drawn = []
    by_stride = st.sampled_from([1, 4, 8, 16]).flatmap(lambda n: cases(method="hybrid", row_stride=n, block_sizes=[16]))
    for length in (16384, 64, 160, 512):
        with hybrid_length(length):
            compare_drawn(by_stride, 15)
            drawn.append(compare_drawn(sparse_cases(method="hybrid", row_stride=4), 8))
    assert sum(each.sparse for each in drawn) > 0.15 * sum(each.heads for each in drawn)


def test_the_constants_are_those_of_the_text():
    """docs/algorithm.md has them as numbers; the oracle reads the product's."""
    by_length = {"length": 16384, "gamma": 0.9, "longer": 1 / 2, "most_longer": 1, "earlier_rows": 3 / 5, "first_rows": 1 / 2}
    shares = {"key_block": 1 / 2, "diagonal": 1 / 5, "rows": 1 / 5, "lines": 1 / 16, "nearest": 8, "halvings": 6, "slack": 1 / 64}
    assert hybrid_rule() == Rule(**by_length, **shares)


def test_one_compilation_serves_both_sides_of_the_length():
    run, counter = traced(lambda q, k: hybrid_mask(q, k, 0.9, block_size=32, min_budget=32).kv_indices)
    with hybrid_length(256):
        for length in (600, 130, 257, 200):
            query, key, _ = cut(length, 1)
            expected = hybrid_mask(query, key, 0.9, block_size=32, min_budget=32)
            assert torch.equal(run(query, key), expected.kv_indices)
            # the second length makes the size symbolic
            assert counter.frame_count <= 2


def test_what_one_of_the_last_rows_attends_to_is_kept_where_they_stand():
    # rows look at block 1, but one of the last 16 at block 2
    query, key = torch.zeros(1, 1, 320, 16), torch.zeros(1, 1, 320, 16)
    key[..., 16:32, 0] = key[..., 32:48, 1] = 1
    query[..., 0] = 60
    query[..., 317, :2] = torch.tensor([0.0, 60.0])
    options = {"block_size": 16, "min_budget": 0, "row_stride": 16, "last_rows_dense": False}
    keep = Case(query, key, Config(0.9, method="hybrid", **options)).search().keep[0, 0]
    assert keep[19, 2] and not keep[5:19, 2].any() and keep[1:, 1].all() and not keep[6:, 3:5].any()


@pytest.mark.parametrize("tokens", [16384, 32768])
def test_by_default_even_heads_hold_half_and_have_no_cliff(tokens):
    gammas = (0.8, 0.9, 0.93, 0.95, 0.98)
    query, key = torch.zeros(1, len(gammas), tokens, 16), torch.zeros(1, 1, tokens, 16)
    _, stats = hybrid_mask(query, key, gammas, return_stats=True)
    kept = dict(zip(gammas, stats.row_coverage[0].tolist(), strict=True))
    assert min(kept.values()) > 0.5 and kept[0.93] - kept[0.9] < 0.3


@pytest.mark.parametrize("share", [0.25, 0.75])
def test_of_equal_blocks_the_nearest_hold_the_floor(share):
    """Up to 180 blocks in a query block; six halvings of the threshold reach the share of one in 161, then all stay."""
    query, key = torch.zeros(1, 1, 2880, 16), torch.zeros(1, 1, 2880, 16)
    mask = hybrid_mask(query, key, 0.01, block_size=16, min_budget=0, min_coverage=share)
    keep = mask.to_dense()[0, 0].bool()
    for row in range(8, 178):
        number = math.ceil(share * (row + 1) - 1 / 64) if row < 161 else row + 1
        assert keep[row].nonzero().flatten().tolist() == sorted({0, *range(row + 1 - number, row + 1)})


@interpreted
@pytest.mark.parametrize("share", [0.6, 0.75])
def test_rounded_sums_of_equal_blocks_add_none_in_kernels(share):
    query, key = torch.zeros(1, 1, 512, 16), torch.zeros(1, 1, 512, 16)
    with by_kernels():
        keep = hybrid_mask(query, key, 0.2, block_size=16, min_budget=0, min_coverage=share).to_dense()[0, 0].bool()
    for row in range(8, 30):
        number = math.ceil(share * (row + 1) - 1 / 64)
        assert keep[row].nonzero().flatten().tolist() == sorted({0, *range(row + 1 - number, row + 1)})


def test_a_query_block_without_a_sampled_row_keeps_no_floor():
    """Its first row alone would be sampled, and is padding."""
    query, key, padding = torch.zeros(1, 1, 320, 16), torch.zeros(1, 1, 320, 16), torch.ones(1, 320, dtype=torch.bool)
    padding[0, 160] = False
    options = {"block_size": 16, "min_budget": 0, "row_stride": 16, "min_coverage": 0.5, "attention_mask": padding}
    keep = hybrid_mask(query, key, 0.2, **options).to_dense()[0, 0]
    assert [keep[row].sum().item() for row in (9, 10, 11)] == [6, 2, 7]


@pytest.mark.parametrize("gamma", [0.95, 0.9999, 1.0])
def test_thresholds_fall_with_the_length_at_every_gamma(gamma):
    query = torch.zeros(1, 1, 320, 16)
    problem = cut_into_blocks(attention_inputs(query, query).with_offset(), 16, plain)
    rule = hybrid_rule()._replace(length=64)
    found = hybrid.plain.thresholds(problem, problem.as_tensor(gamma, (1,)), hybrid.RULE._replace(length=64))
    expected = thresholds(visibility(320, 0, torch.ones(320, dtype=torch.bool), None, 16), gamma, rule)
    torch.testing.assert_close(found.lines[:, 0, 0].tolist(), [expected.key_block, expected.diagonal])
    torch.testing.assert_close(found.rows[0, 0].tolist(), expected.rows)


def test_the_nearest_blocks_of_last_rows_that_are_not_dense_reach_eight_times_as_far():
    """Of even attention, in which no block passes a threshold; also where `min_budget` exceeds every prompt."""
    query, key = torch.zeros(1, 1, 256, 16), torch.zeros(1, 1, 256, 16)
    options = {"block_size": 16, "min_coverage": 0.0, "last_rows_dense": False}
    keep = hybrid_mask(query, key, 0.01, min_budget=16, **options).to_dense()[0, 0]
    assert [keep[row].nonzero().flatten().tolist() for row in (12, 15)] == [[0, 12], [0, *range(8, 16)]]
    everything = hybrid_mask(query, key, 0.01, min_budget=2**62, **options).to_dense()[0, 0]
    assert torch.equal(everything.bool(), torch.ones(16, 16, dtype=torch.bool).tril())


@pytest.mark.parametrize(
    "by", [contextlib.nullcontext, pytest.param(by_kernels, marks=interpreted)], ids=["plain steps", "kernels"]
)
@pytest.mark.parametrize("geometry", LAST_BLOCKS.values(), ids=LAST_BLOCKS)
def test_query_blocks_of_the_last_rows_keep_what_they_see_and_others_what_they_kept(geometry, by):
    tokens, dense, given = geometry
    query, key = structured_inputs(torch.Generator().manual_seed(5), 1, 2, 1, tokens, 200, 32, sharpness=5.0)
    options = {"block_size": 16, "min_budget": 0, "min_coverage": 0.3, **given}
    seen = hybrid_mask(query, key, 1.0, **options).to_dense().bool()
    with by():
        sparse, found = (hybrid_mask(query, key, 0.3, last_rows_dense=on, **options) for on in (False, True))
    expected = sparse.to_dense().bool()
    assert not torch.equal(expected[:, :, dense], seen[:, :, dense])
    expected[:, :, dense] = seen[:, :, dense]
    assert torch.equal(found.to_dense().bool(), expected) and (expected.sum((2, 3)) < seen.sum((2, 3))).all()
