"""method="published": block sets against the reference and by hand."""

import math

import pytest
import torch
from hypothesis import given, settings

from flexmask.block_masks import published_mask
from tests.cases import Case, Config, published_cases, structured_inputs
from tests.comparisons import Drawn, Tally, assert_same_blocks, assert_same_statistics, assert_well_formed
from tests.expected import by_block, visible_pairs

BLOCK = 16


def test_equals_the_reference():
    tally, drawn = Tally(), Drawn()

    @settings(max_examples=60)
    @given(published_cases(max_budget=None))
    def run(case):
        result, expected = case.search(), case.reference()
        assert_well_formed(result)
        assert_same_blocks(result, expected)
        tally.add_decisions(expected)
        drawn.add(expected)
        assert_same_statistics(result, expected, underflow=True)

    run()
    tally.check()
    drawn.check()


@settings(max_examples=25)
@given(published_cases())
def test_equals_the_reference_with_caps(case):
    result, expected = case.search(), case.reference()
    assert_same_blocks(result, expected)
    assert_same_statistics(result, expected, underflow=True)


@settings(max_examples=15)
@given(published_cases())
def test_equals_the_reference_where_shares_underflow(case):
    case.scores = {"scale": 3.0}
    result, expected = case.search(), case.reference()
    assert_same_blocks(result, expected)
    assert_same_statistics(result, expected, underflow=True)
    # near float32's smallest number underflow depends on the order of a sum
    underflown = result.stats.js_distance.isnan()
    assert not (underflown & result.stats.is_query_aware).any()


@settings(max_examples=15)
@given(published_cases(min_budget=0))
def test_equals_the_reference_without_a_floor(case):
    result, expected = case.search(), case.reference()
    assert_same_blocks(result, expected)
    assert_same_statistics(result, expected, underflow=True)


@pytest.mark.parametrize("block_size", [64, 128])
def test_equals_the_reference_in_blocks_of_real_size(block_size):
    generator = torch.Generator().manual_seed(block_size)
    query, key = structured_inputs(generator, 1, 4, 2, 1536, 1536, 32, sharpness=4.0)
    config = Config(0.8, 0.3, block_size=block_size, min_budget=block_size, method="published")
    case = Case(query, key, config)
    result, expected = case.search(), case.reference()
    assert not assert_same_blocks(result, expected).any()
    assert_same_statistics(result, expected, underflow=True)
    assert (result.stats.density < 0.9).any()


def by_scores(scores, **options):
    """Blocks of one head whose scores are given."""
    length = len(scores)
    assert length <= 256  # the largest head_dim
    key = torch.eye(length)[None, None]
    options = {"gamma": 0.9, "tau": 0.0, "block_size": BLOCK, "min_budget": 0, **options}
    case = Case(scores[None, None], key, Config(method="published", **options), {"scale": 1.0})
    result = case.search()
    return set(map(tuple, result.keep[0, 0].nonzero().tolist())), result.stats


def planted_slash(length, offset):
    scores = torch.full((length, length), -200.0)
    for row in range(offset, length):
        scores[row, row - offset] = 0.0
    return scores


def causal_where(blocks, wanted):
    return {(r, j) for r in range(blocks) for j in range(r + 1) if wanted(r, j)}


def test_a_slash_stands_for_one_diagonal():
    # offset 21 crosses diagonals 1 and 2 and lies in block 1; rows 80 to 95 see keys 59 to 74, mostly block 4
    kept, _ = by_scores(planted_slash(96, 21), min_budget=2 * BLOCK)
    assert kept == causal_where(6, lambda r, j: j in (0, 4) or r - j in (0, 1))


def test_block_zero_takes_a_place_of_the_count():
    kept, stats = by_scores(planted_slash(96, 21))
    assert (stats.num_vertical_blocks.item(), stats.num_slash_blocks.item()) == (1, 1)
    assert kept == causal_where(6, lambda r, j: j in (0, r))


def test_tokens_become_blocks_by_128_whatever_the_block_is():
    # 231 of 256 even keys hold at most 0.9: 232 // 128 + 1 = 2 blocks; all 256 make 3
    _, stats = by_scores(torch.zeros(256, 256), gamma=0.9)
    assert stats.num_vertical_blocks.item() == 2
    _, stats = by_scores(torch.zeros(256, 256), gamma=1.0)
    assert stats.num_vertical_blocks.item() == 3


def test_the_crossing_block_is_left_out_of_a_query_aware_head():
    # pooled map 1 / 0.25 0.75 / 0.25 0.5 0.25: 1 + 0.75 stay within 0.6 * 3 and the 0.5 crosses
    levels = torch.tensor([[1.0, 1, 1], [1, 3, 1], [1, 2, 1]]).log()
    scores = levels.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
    kept, stats = by_scores(scores, gamma=0.6, tau=1.0)
    assert stats.is_query_aware.item()
    assert (2, 1) not in kept
    kept, _ = by_scores(scores, gamma=0.76, tau=1.0)
    assert (2, 1) in kept


def test_underflow_makes_a_head_vertical_slash():
    scores = torch.zeros(32, 32)
    _, stats = by_scores(scores, tau=1.0)
    assert stats.is_query_aware.item()
    scores[16:, :16] = -200.0
    _, stats = by_scores(scores, tau=1.0)
    assert math.isnan(stats.js_distance.item())
    assert not stats.is_query_aware.item()


def test_a_floor_beyond_the_prompt_counts_the_blocks_that_are_there():
    _, stats = by_scores(torch.zeros(48, 48), tau=1.0, min_budget=1024)
    assert stats.is_query_aware.item()
    assert (stats.num_vertical_blocks.item(), stats.num_slash_blocks.item()) == (3, 3)


def test_two_equal_distributions_have_no_distance():
    # the rounded sum of a row's attention may exceed 1
    query, key = torch.randn(2, 1, 64, 64, 32, generator=torch.Generator().manual_seed(0)).unbind(0)
    config = Config(tau=0.5, block_size=64, method="published")
    stats = Case(query, key, config).search().stats
    assert (stats.js_distance < 1e-3).all()
    assert stats.is_query_aware.all()


@settings(max_examples=25)
@given(published_cases())
def test_keeps_visible_blocks_only(case):
    visible = by_block(visible_pairs(case), case.config.block_size)[:, None]
    assert not (case.search().keep & ~visible).any()


@pytest.mark.gpu
def test_equals_the_reference_on_cuda(cuda):
    tally = Tally()
    config = Config(0.8, 0.3, block_size=32, min_budget=32, method="published")
    generator = torch.Generator().manual_seed(3)
    for length in (512, 640, 1024):
        case = Case(*structured_inputs(generator, 1, 8, 2, length, length, 64, sharpness=4.0), config)
        result, expected = case.to(cuda).search(), case.reference()
        assert_well_formed(result)
        assert_same_blocks(result, expected)
        tally.add_decisions(expected)
        assert_same_statistics(result, expected, underflow=True)
    tally.check()


@pytest.mark.gpu
def test_compiles_for_a_map_of_many_blocks_on_cuda(cuda):
    # Inductor 2.11 cannot fuse a comparison with gammas by head into split running sums
    query, key = structured_inputs(torch.Generator().manual_seed(4), 1, 4, 2, 4096, 4096, 32, sharpness=4.0)
    options = {"tau": 1.0, "block_size": 32, "min_budget": 32}
    masks = [published_mask(query.to(to), key.to(to), [0.5, 0.6, 0.7, 0.8], **options).to_dense().cpu() for to in (cuda, "cpu")]
    assert 0.01 < masks[1].float().mean() < 0.5
    # rounding may decide a block at the boundary
    assert (masks[0] != masks[1]).float().mean() < 1e-3


@pytest.mark.parametrize("tau", [0.0, 1.0])
def test_gamma_one_keeps_every_block_whatever_rounding_does(tau):
    # the running sum exceeds the number of blocks by rounding
    for seed in range(4):
        query, key = structured_inputs(torch.Generator().manual_seed(seed), 1, 4, 2, 1280, 1280, 32, sharpness=5.0)
        result = Case(query, key, Config(1.0, tau, min_budget=0, method="published")).search()
        assert (result.stats.density == 1).all()
