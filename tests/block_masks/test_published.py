"""method="published": block sets against the reference and by hand."""

import pytest
import torch
from hypothesis import given, settings

from flexmask.block_masks import published_mask
from tests.cases import Case, Config, published_cases, structured_inputs
from tests.comparisons import Tally, assert_as_the_oracle, compare_drawn


def test_equals_the_reference():
    compare_drawn(published_cases(max_budget=None), 60).check()


@settings(max_examples=15)
@given(published_cases())
def test_equals_the_reference_where_shares_underflow(case):
    case.scores = {"scale": 3.0}
    result = case.search()
    assert_as_the_oracle(result, case.reference(), underflow=True)
    # near float32's smallest number underflow depends on the order of a sum
    underflown = result.stats.js_distance.isnan()
    assert not (underflown & result.stats.is_query_aware).any()


@pytest.mark.gpu
def test_equals_the_reference_on_cuda(cuda):
    tally = Tally()
    config = Config(0.8, 0.3, block_size=32, min_budget=32, method="published")
    generator = torch.Generator().manual_seed(3)
    for length in (512, 640, 1024):
        case = Case(*structured_inputs(generator, 1, 8, 2, length, length, 64, sharpness=4.0), config)
        assert_as_the_oracle(case.to(cuda).search(), case.reference(), tally, underflow=True)
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
