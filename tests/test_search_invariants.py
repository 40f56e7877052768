"""Invariants of the search, without the reference."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.cases import cases, sparse_cases
from tests.comparisons import assert_equal_lists, assert_honest, assert_same_stats
from tests.compile_support import assert_same_lists
from tests.expected import visible_pairs


def spoiled(x, generator):
    return x + torch.randn(x.shape, generator=generator).to(x.dtype)


@settings(max_examples=30)
@given(cases(), st.integers(0, 2**31))
def test_tokens_that_do_not_count_have_no_say(case, seed):
    generator = torch.Generator().manual_seed(seed)
    pairs = visible_pairs(case)
    before = case.search()
    row_counts, key_counts = pairs.any(-1)[:, None, :, None], pairs.any(-2)[:, None, :, None]
    query = torch.where(row_counts, case.query, spoiled(case.query, generator))
    if "window" not in case.scores:  # keys out of every row's window still weigh in their block's mean
        case.key = torch.where(key_counts, case.key, float("nan"))
    after = case.search(query)
    assert_equal_lists(after, before)


@settings(max_examples=40)
@given(cases() | cases(method="hybrid", row_stride=16), st.sampled_from([1, 2, 2**63]))
def test_window_of_all_tokens_or_more_is_none(case, times):
    length = case.key.shape[2]
    keywords = {**case.keywords(), "return_stats": True}
    (mask, stats), (none, none_stats) = (
        case.config.mask(case.query, case.key, **{**keywords, "window": window})
        for window in (min(times * length, 2**63 - 1), None)
    )
    assert_same_lists(mask, none)
    assert_honest(mask, (case.query.shape[2], length))
    assert_same_stats(stats, none_stats)


@settings(max_examples=20)
@given(cases())
def test_same_inputs_give_the_same_bits(case):
    first, second = case.search(), case.search()
    # as models pass it
    strided = case.search(*(x.transpose(1, 2).contiguous().transpose(1, 2) for x in (case.query, case.key)))
    for other in (second, strided):
        assert_equal_lists(other, first)
        assert_same_stats(other.stats, first.stats)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
def test_half_precision_inputs_give_the_mask_of_their_values_in_float32(dtype):
    @settings(max_examples=25)
    @given(sparse_cases())
    def run(case):
        query, key = case.query.to(dtype), case.key.to(dtype)
        half, whole = case.search(query, key), case.search(query.float(), key.float())
        assert torch.equal(half.keep, whole.keep)
        assert torch.equal(half.stats.js_distance, whole.stats.js_distance)
        assert half.stats.coverage.dtype == torch.float32

    run()
