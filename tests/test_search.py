"""The fast path against the reference; what gamma promises, and invariants; NaN and infinity spoil the head they are in alone."""

import contextlib

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import flexmask
from tests.attention_calls import call
from tests.cases import Case, Config, cases, published_cases, sparse_cases, structured_inputs
from tests.comparisons import (
    assert_as_the_oracle,
    assert_equal_lists,
    assert_honest,
    assert_same_stats,
    assert_well_formed,
    compare_drawn,
)
from tests.compile_support import assert_same_lists
from tests.expected import visible_pairs

# float64 sums of the reference's shares against float32 decisions
ROUNDING = 1e-5


def test_equals_the_reference():
    compare_drawn(cases(), 120)


def test_equals_the_reference_where_blocks_are_dropped():
    compare_drawn(sparse_cases(), 50).check()
    compare_drawn(published_cases(max_budget=None), 60).check()


@settings(max_examples=15)
@given(published_cases())
def test_published_equals_the_reference_where_shares_underflow(case):
    case.scores = {"scale": 3.0}
    result = case.search()
    assert_as_the_oracle(result, case.reference(), underflow=True)
    # near float32's smallest number underflow depends on the order of a sum
    underflown = result.stats.js_distance.isnan()
    assert not (underflown & result.stats.is_query_aware).any()


@pytest.mark.parametrize("tau", [0.0, 1.0])
def test_published_keeps_every_block_at_gamma_one(tau):
    # the running sum exceeds the number of blocks by rounding
    for seed in range(4):
        query, key = structured_inputs(torch.Generator().manual_seed(seed), 1, 4, 2, 1280, 1280, 32, sharpness=5.0)
        result = Case(query, key, Config(1.0, tau, min_budget=0, method="published")).search()
        assert (result.stats.density == 1).all()


@pytest.mark.parametrize("method", ["flexprefill", "hybrid"])
def test_every_window_around_the_edges_of_blocks_equals_the_reference(method):
    for window in range(30, 52):
        case = call(q_len=91, kv_len=139, heads=(2, 1), scores={"window": window}, method=method, tau=0.5, row_stride=4)
        assert_as_the_oracle(case.search(), case.reference())


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


@settings(max_examples=30)
@given(cases(), st.integers(0, 2**31))
def test_tokens_that_do_not_count_have_no_say(case, seed):
    generator = torch.Generator().manual_seed(seed)
    pairs = visible_pairs(case)
    before = case.search()
    row_counts, key_counts = pairs.any(-1)[:, None, :, None], pairs.any(-2)[:, None, :, None]
    query = torch.where(row_counts, case.query, case.query + torch.randn(case.query.shape, generator=generator))
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


VALUES = st.sampled_from([float("nan"), float("inf"), -float("inf")])


def assert_others_untouched(before, after, spoiled):
    """Lists and statistics of heads that are not `spoiled`, (batch, num_heads) bool, are the same to the bit."""
    for parts in zip(*((*each.lists, *vars(each.stats).values()) for each in (before, after)), strict=True):
        first, second = (part[~spoiled] for part in parts)
        torch.testing.assert_close(first, second, rtol=0, atol=0, equal_nan=True)


def spoil(case, data, name):
    """Write NaN or infinity into one head; results before and after, and which heads may differ."""
    before = case.search()
    batch, num_heads = case.query.shape[:2]
    inputs = {"query": case.query.clone(), "key": case.key.clone()}
    b, h = data.draw(st.integers(0, batch - 1)), data.draw(st.integers(0, inputs[name].shape[1] - 1))
    one = st.integers(0, inputs[name].shape[2] - 1).map(lambda token: slice(token, token + 1))
    tokens = data.draw(one | st.sampled_from([slice(-1, None), slice(None)]), label="tokens")
    dims = data.draw(st.sampled_from([slice(0, 1), slice(None)]))
    inputs[name][b, h, tokens, dims] = data.draw(VALUES)
    groups = num_heads // inputs[name].shape[1]
    spoiled = torch.zeros(batch, num_heads, dtype=torch.bool)
    spoiled[b, h * groups : (h + 1) * groups] = True
    return before, case.search(**inputs), spoiled


@pytest.mark.parametrize("name", ["query", "key"])
def test_spoils_its_own_head_only(device, name):
    # a GPU's run can be repeated
    examples = {"max_examples": 60} if device.type == "cpu" else {"max_examples": 25, "derandomize": True, "database": None}

    @settings(**examples)
    @given(cases() | published_cases(), st.data())
    def run(case, data):
        assume(case.query.shape[2] > 1)
        before, after, spoiled = spoil(case.to(device), data, name)
        assert_others_untouched(before, after, spoiled.to(device))
        assert_well_formed(after)

    with contextlib.nullcontext() if device.type == "cpu" else torch.compiler.set_stance("force_eager"):
        run()


@pytest.mark.gpu
@pytest.mark.parametrize("token", [515, 8], ids=["of the last rows", "of the first rows"])
@pytest.mark.parametrize("name", ["query", "key"])
def test_a_spoiled_head_keeps_the_same_by_kernels_as_in_plain_steps(cuda, name, token):
    """A maximum drops NaN on a GPU."""
    generator = torch.Generator().manual_seed(0)
    inputs = {part: torch.randn(1, 2, 520, 64, generator=generator) for part in ("query", "key")}
    inputs[name][0, 1, token] = torch.nan
    masks = [
        flexmask.hybrid_mask(**{part: x.to(device) for part, x in inputs.items()}, gamma=0.5, block_size=32, min_budget=0)
        for device in ("cpu", cuda)
    ]
    plain, by_kernels = (mask.to_dense()[0, 1].cpu() for mask in masks)
    assert torch.equal(plain, by_kernels)
