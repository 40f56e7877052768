"""method="hybrid": plain code against the oracle; its rule."""

import contextlib
import math
from typing import Any

import pytest
import torch
from hypothesis import strategies as st

from flexmask import compilation, hybrid_mask, plain
from flexmask._torch import HAS_TRITON
from flexmask.base.blocks import block_problem
from flexmask.base.inputs import attention_inputs
from flexmask.block_masks import hybrid
from flexmask.selection import prepare
from tests.cases import Case, Config, by_kernels, cases, hybrid_rule, lower_thresholds, sparse_cases, structured_inputs
from tests.comparisons import compare_drawn
from tests.oracle.hybrid import Rule

interpreted = pytest.mark.skipif(torch.cuda.is_available() or not HAS_TRITON, reason="needs Triton's interpreter")
STEPS = [pytest.param(contextlib.nullcontext, id="plain steps"), pytest.param(by_kernels, marks=interpreted, id="kernels")]
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
    fixed: dict[str, Any] = {"method": "hybrid", "block_sizes": [16], "budgets": (0, 3)}
    by_stride = st.sampled_from([1, 4, 8, 16]).flatmap(lambda n: cases(row_stride=n, **fixed))
    for factor in (1, 0.3, 0.1):
        with lower_thresholds(factor):
            compare_drawn(by_stride, 20)
            drawn.append(compare_drawn(sparse_cases(method="hybrid", row_stride=4), 10))
    assert sum(each.sparse for each in drawn) > 0.15 * sum(each.heads for each in drawn)


def test_the_constants_are_those_of_the_text():
    """docs/algorithm.md has them as numbers; the oracle reads the product's."""
    assert hybrid_rule() == Rule(row_multiple=32, last_row_multiple=80, halvings=6, slack=1 / 64)


def test_a_key_block_that_one_of_the_last_rows_attends_to_is_kept_by_all():
    # rows look at block 1, but one of the last 16 at block 2
    query, key = torch.zeros(1, 1, 320, 16), torch.zeros(1, 1, 320, 16)
    key[..., 16:32, 0] = key[..., 32:48, 1] = 1
    query[..., 0] = 60
    query[..., 317, :2] = torch.tensor([0.0, 60.0])
    options = {"block_size": 16, "min_budget": 0, "row_stride": 16, "last_rows_dense": False}
    keep = Case(query, key, Config(0.9, method="hybrid", **options)).select().keep[0, 0]
    assert keep[1:, 1].all() and keep[2:, 2].all() and not keep[6:, 3:5].any()


@pytest.mark.parametrize("tokens", [16384, 32768])
def test_by_default_even_heads_hold_half_and_have_no_cliff(tokens):
    gammas = (0.8, 0.9, 0.93, 0.95, 0.98)
    query, key = torch.zeros(1, len(gammas), tokens, 16), torch.zeros(1, 1, tokens, 16)
    _, stats = hybrid_mask(query, key, gammas, return_stats=True)
    kept = dict(zip(gammas, stats.row_coverage[0].tolist(), strict=True))
    assert min(kept.values()) > 0.5 and kept[0.93] - kept[0.9] < 0.3


@pytest.mark.parametrize("by", STEPS)
@pytest.mark.parametrize("share", [0.25, 0.6, 0.75])
def test_of_equal_blocks_the_nearest_hold_the_floor(share, by):
    """Rounding of their sums adds none."""
    blocks, gamma = (180, 0.01) if by is contextlib.nullcontext else (32, 0.2)
    query, key = torch.zeros(1, 1, 16 * blocks, 16), torch.zeros(1, 1, 16 * blocks, 16)
    with by():
        keep = hybrid_mask(query, key, gamma, block_size=16, min_budget=0, min_coverage=share).to_dense()[0, 0].bool()
    for row in range(8, blocks - 2):
        number = math.ceil(share * (row + 1) - 1 / 64)
        assert keep[row].nonzero().flatten().tolist() == sorted({0, *range(row + 1 - number, row + 1)})


@pytest.mark.parametrize("by", STEPS)
@pytest.mark.parametrize(
    ("weight", "kept"),
    # row 18: 10 + 18 = 28, of which 0.8 is 22.4: block 0 holds 10, the 13 nearest others the rest
    # row 11: block 0 holds 45 of 56, more than 0.8; row 12: 45 of 57, less
    [(10, {18: [0, *range(6, 19)]}), (45, {11: [0, 11], 12: [*range(13)], 18: [*range(19)]})],
    ids=["the sixth halving reaches the floor", "six halvings hold less"],
)
def test_six_halvings_or_everything(weight, kept, by):
    """Block 0 weighs as much as 10 others, each at a 64th of the threshold and none at a 32nd, or as 45, none at a 64th."""
    query, key = torch.zeros(1, 1, 320, 16), torch.zeros(1, 1, 320, 16)
    query[..., 0], key[..., :16, 0] = 1, math.log(weight)
    with by():
        keep = hybrid_mask(query, key, 0.01, block_size=16, min_budget=0, min_coverage=0.8, scale=1.0).to_dense()[0, 0]
    assert {row: keep[row].nonzero().flatten().tolist() for row in kept} == kept


def test_a_query_block_without_a_sampled_row_keeps_no_floor():
    """Its first row alone would be sampled, and is padding."""
    query, key, padding = torch.zeros(1, 1, 320, 16), torch.zeros(1, 1, 320, 16), torch.ones(1, 320, dtype=torch.bool)
    padding[0, 160] = False
    options = {"block_size": 16, "min_budget": 0, "row_stride": 16, "min_coverage": 0.5, "attention_mask": padding}
    keep = hybrid_mask(query, key, 0.2, **options).to_dense()[0, 0]
    assert [keep[row].sum().item() for row in (9, 10, 11)] == [6, 2, 7]


def test_nearest_blocks_reach_as_far_as_min_budget():
    """Of even attention, in which no block passes a threshold; also where `min_budget` exceeds every prompt."""
    query, key = torch.zeros(1, 1, 256, 16), torch.zeros(1, 1, 256, 16)
    options = {"block_size": 16, "min_coverage": 0.0, "last_rows_dense": False}
    keep = hybrid_mask(query, key, 0.01, min_budget=40, **options).to_dense()[0, 0]
    assert [keep[row].nonzero().flatten().tolist() for row in (12, 15)] == [[0, 10, 11, 12], [0, 13, 14, 15]]
    everything = hybrid_mask(query, key, 0.01, min_budget=2**62, **options).to_dense()[0, 0]
    assert torch.equal(everything.bool(), torch.ones(16, 16, dtype=torch.bool).tril())


def unit_of_thresholds(gamma, rows, tokens, padded, **options):
    """The unit of a call whose second batch row begins with padding, (2,)."""
    query, key = torch.zeros(2, 1, rows, 16), torch.zeros(2, 1, tokens, 16)
    is_token = torch.arange(tokens) >= torch.tensor([[0], [padded]])
    problem = block_problem(attention_inputs(query, key, attention_mask=is_token, **options).with_offset(), 16, plain)
    return hybrid.plain.threshold_unit(problem, problem.as_tensor(gamma, (1,)))[:, 0]


@pytest.mark.parametrize("gamma", [0.5, 0.95, 0.9999, 1.0])
@pytest.mark.parametrize(("window", "most"), [(None, (20, 12)), (100, (8, 8))])
def test_shares_are_of_the_blocks_that_the_widest_query_block_sees(gamma, window, most):
    found = unit_of_thresholds(gamma, 320, 320, 130, window=window)
    torch.testing.assert_close(found.tolist(), [(1 - gamma) / number for number in most])


@pytest.mark.parametrize("window", [None, 100, 1000])
@pytest.mark.parametrize(("rows", "tokens"), [(96, 96), (64, 160), (16, 304)])
def test_a_chunk_s_shares_are_those_of_its_prompt(rows, tokens, window):
    of_chunk = unit_of_thresholds(0.9, rows, tokens, 35, window=window, prompt_len=330)
    assert torch.equal(of_chunk, unit_of_thresholds(0.9, 330, 330, 35, window=window))


def test_a_longer_prompt_lowers_the_thresholds_of_a_chunk(monkeypatch):
    """Also in compiled steps, as devices run them that have no kernels."""
    query, key = structured_inputs(torch.Generator().manual_seed(5), 1, 2, 1, 160, 320, 32, sharpness=5.0)
    options = {"gamma": 0.95, "block_size": 16, "min_budget": 0, "min_coverage": 0.0, "last_rows_dense": False}
    lengths = (None, 320, 640, 6400, 2**62)
    expected = [hybrid_mask(query, key, **options, prompt_len=tokens).to_dense() for tokens in lengths]
    kept = [int(keep.sum()) for keep in expected]
    assert kept[0] == kept[1] < kept[2] < kept[3] <= kept[4]
    for module in (compilation, prepare):
        monkeypatch.setattr(module, "runs_uncompiled", lambda query: False)
    monkeypatch.setattr(compilation, "compiled", lambda function, *_: function)
    found = [hybrid_mask(query, key, **options, prompt_len=tokens).to_dense() for tokens in lengths]
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("by", STEPS)
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
