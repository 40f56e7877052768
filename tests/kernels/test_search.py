"""The search by Triton kernels against the reference, in Triton's interpreter.

`tests/test_search_on_gpu.py` runs it on a GPU for real. The interpreter is slow, so the cases here are short.
"""

import functools
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from flexmask import FlexPrefillConfig
from flexmask import search as dispatcher
from flexmask.base.inputs import AttentionInputs
from tests.cases import Case, attention_masks, configs, drawn_inputs, q_offsets, score_options, sparse_cases, structured_inputs
from tests.comparisons import Drawn, Tally, assert_same_blocks, assert_same_statistics, assert_well_formed, same_values

pytest.importorskip("triton")

from flexmask.kernels import query_aware_top_p
from flexmask.kernels.hybrid import search as hybrid_search
from flexmask.kernels.search import search as kernel_search

interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="where there is a GPU, kernels run there")


@pytest.fixture(autouse=True)
def _few_chunks(monkeypatch):
    """The interpreter runs programs one after the other: 64 chunks of rows a pass take it seconds."""
    monkeypatch.setattr(query_aware_top_p, "_MEDIUM", (5, 4))
    monkeypatch.setattr(query_aware_top_p, "_LARGE", (3, 4))
    # some maps of each kind
    monkeypatch.setattr(query_aware_top_p, "SMALL_MAP", 64)
    monkeypatch.setattr(query_aware_top_p, "MEDIUM_MAP", 144)


@st.composite
def short_cases(draw):
    config = draw(configs([16, 32, 48], st.sampled_from([0.43, 0.71, 0.91, 1.0]), (0, 1, 4)))
    kv_len = draw(st.sampled_from([1, 15, 63, 129]) | st.integers(1, 260))
    q_len = draw(st.just(kv_len) | st.integers(1, kv_len))
    case = drawn_inputs(draw, config, draw(st.integers(1, 2)), q_len, kv_len, draw(st.sampled_from([1.0, 5.0])))
    case.attention_mask = draw(attention_masks(case.query.shape[0], kv_len))
    case.q_offset = draw(q_offsets(case.query.shape[0], kv_len - q_len))
    case.scores = draw(score_options(kv_len))
    return case


@pytest.fixture
def _poisoned():
    """Memory that nothing was written to holds NaN, the largest number or True, so that reading it shows."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        assert torch.utils.deterministic.fill_uninitialized_memory
        assert torch.empty(100).isnan().all()
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


@interpreted
@pytest.mark.usefixtures("_poisoned")
def test_equals_the_reference(monkeypatch):
    monkeypatch.setattr(dispatcher, "plain_search", kernel_search)
    tally, drawn = Tally(), Drawn()

    @settings(max_examples=15)
    @given(short_cases() | sparse_cases(most_blocks=16))
    def run(case):
        expected, result = case.reference(), case.search()
        assert_well_formed(result)
        assert_same_blocks(result, expected)
        tally.add_decisions(expected)
        assert_same_statistics(result, expected)
        drawn.add(expected)

    run()
    tally.check()
    assert drawn.sparse > 0 and drawn.query_aware > 0


@interpreted
@pytest.mark.usefixtures("_poisoned")
@pytest.mark.parametrize(
    ("heads", "options"),
    [
        # the next three have the same rules, with more
        pytest.param((4, 1), {"tau": 0.3}, marks=pytest.mark.slow),
        pytest.param(
            (3, 1),
            {"tau": 0.6, "query_aware": "per_query", "pattern_queries": "middle", "min_budget": 16},
            marks=pytest.mark.slow,
        ),
        ((4, 2), {"tau": 0.6, "max_budget": 48}),
        ((4, 2), {"tau": 0.6, "gamma": [0.31, 1.0, 0.91, 0.43]}),
        ((4, 2), {"tau": 0.6, "query_aware": "per_query", "gamma": [1.0, 0.61, 0.31, 0.83]}),
        ((6, 2), {"gamma": [0.7, 0.8, 0.6, 1.0, 0.5, 0.9], "selection": "hybrid", "min_budget": 16, "row_stride": 4}),
    ],
    ids=["flatten", "per_query", "capped", "by head, flatten", "by head, per_query", "hybrid"],
)
def test_masks_equal_those_of_the_plain_search(monkeypatch, heads, options):
    generator = torch.Generator().manual_seed(sum(heads))
    query, key = structured_inputs(generator, 2, *heads, 150, 190, 32, sharpness=5.0)
    config = FlexPrefillConfig(**{"gamma": 0.43, "block_size": 16, "min_budget": 0, **options})
    padding = torch.arange(190)[None] >= torch.tensor([[0], [37]])
    case = Case(query, key, config, {"window": 150, "softcap": 20.0}, padding, torch.tensor([3, 40]))
    plain, expected = case.search(), case.reference()
    monkeypatch.setattr(dispatcher, "plain_search", kernel_search)
    fused = case.search()
    assert_well_formed(fused)
    # exact where the reference has a margin, which is everywhere here
    assert not assert_same_blocks(fused, expected).any()
    assert all(torch.equal(*pair) for pair in zip(fused.lists, plain.lists, strict=True))
    assert_same_statistics(fused, expected)
    assert fused.stats.is_query_aware.any() != (config.selection == "hybrid") and (fused.stats.density < 0.9).any()


@interpreted
@pytest.mark.usefixtures("_poisoned")
@pytest.mark.parametrize(
    "options",
    [{}, {"query_aware": "per_query", "max_budget": 48, "pattern_queries": "middle"}, {"selection": "hybrid", "row_stride": 4}],
    ids=str,
)
def test_rows_that_do_not_decide(options):
    # tests/test_deciding.py shows what the plain search makes of them
    query, key = structured_inputs(torch.Generator().manual_seed(3), 2, 4, 2, 120, 140, 32, sharpness=5.0)
    config = FlexPrefillConfig(tau=0.5, block_size=16, min_budget=0, **options)
    gamma, tau = torch.full((4,), 0.43, dtype=torch.float64), torch.tensor(0.3, dtype=torch.float64)
    inputs = AttentionInputs(query, key, None, 0.2, offset=torch.tensor([20, 16]), deciding=torch.tensor([120, 50]))
    plain = dispatcher.plain_search(inputs, config, gamma, tau, True, True)
    found = kernel_search(inputs, config, gamma, tau, True, True)
    assert all(torch.equal(*pair) for pair in zip(found.lists, plain.lists, strict=True))
    assert torch.equal(found.keep, plain.keep)
    for got, expected in zip(found.stats, plain.stats, strict=True):
        torch.testing.assert_close(got, expected, equal_nan=True)
    assert found.stats[0][1].any() != (config.selection == "hybrid") and not found.stats[0].all()
    everywhere = dispatcher.plain_search(inputs.with_fields(deciding=None), config, gamma, tau, True, True)
    assert not torch.equal(everywhere.keep[1], plain.keep[1])
    assert torch.equal(everywhere.keep[0], plain.keep[0])


@interpreted
@pytest.mark.parametrize("selection", ["coverage", "hybrid"])
def test_the_default_dtype_changes_nothing(selection):
    query, key = structured_inputs(torch.Generator().manual_seed(3), 1, 2, 1, 90, 90, 32, sharpness=5.0)
    config = FlexPrefillConfig(tau=0.0, block_size=16, min_budget=0, selection=selection)
    gamma, tau = torch.full((2,), 0.43, dtype=torch.float64), torch.tensor(0.0, dtype=torch.float64)
    inputs = AttentionInputs(query, key, None, 0.2)
    expected = kernel_search(inputs, config, gamma, tau, True, True)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        found = kernel_search(inputs, config, gamma, tau, True, True)
    finally:
        torch.set_default_dtype(before)
    assert all(torch.equal(*pair) for pair in zip(found.lists, expected.lists, strict=True))
    assert all(same_values(*pair) and pair[0].dtype == pair[1].dtype for pair in zip(found.stats, expected.stats, strict=True))
    assert (expected.stats[2] < 1).any()


@functools.cache
def problem_of_faults(hybrid):
    """A case, and the reference's blocks, which the kernels find."""
    generator = torch.Generator().manual_seed(18)
    query, key = structured_inputs(generator, 1, 4, 2, 200, 200, 32)
    case = Case(query, key, FlexPrefillConfig(0.5, 0.08, block_size=16, min_budget=0))
    if hybrid:
        case = case.with_config(gamma=0.7, selection="hybrid")
    expected = case.reference()
    assert_same_blocks(case.search(), expected)
    return case, expected


@interpreted
@pytest.mark.parametrize("fault", ["block_sums", "top_p_map", "pattern_and_lines", "row_blocks", "last_rows_lines"])
def test_a_fault_in_a_kernel_is_found(monkeypatch, fault):
    hybrid = fault in ("row_blocks", "last_rows_lines")
    module = sys.modules[hybrid_search.__module__ if hybrid else kernel_search.__module__]
    monkeypatch.setattr(dispatcher, "plain_search", kernel_search)
    case, expected = problem_of_faults(hybrid)
    right = getattr(module, fault)

    def wrong(*arguments):
        result = right(*arguments)
        if fault == "block_sums":
            result.blocks[..., 1:, :, 1] = result.blocks[..., :-1, :, 1].clone()  # a row off by one
        elif fault == "row_blocks":
            result[..., 9, 1:8] ^= 1
        elif fault == "top_p_map":
            result = result.clone()
            result[:, :, 5, 2] ^= 1
        else:
            result.kept[1] = result.kept[1].roll(1, -1)  # slashes off by one block
        return result

    monkeypatch.setattr(module, fault, wrong)
    with pytest.raises(AssertionError, match="blocks differ"):
        assert_same_blocks(case.search(), expected)


@interpreted
@pytest.mark.parametrize("with_stats", [False, True])
def test_operator_has_the_shapes_that_it_declares(monkeypatch, with_stats):
    monkeypatch.setattr(dispatcher, "plain_search", kernel_search)
    # what a surrounding compilation is told, against what it gets
    query, key = torch.randn(2, 4, 50, 16), torch.randn(2, 2, 70, 16)
    gamma, tau = torch.full((4,), 0.7, dtype=torch.float64), torch.tensor(0.7, dtype=torch.float64)
    options = (0.25, None, None, with_stats, True, 0.5, 16, 16, None, "coverage", "flatten", "last", "last", 8)
    with FakeTensorMode() as mode:
        declared = dispatcher.search_operator(
            *(mode.from_tensor(x) for x in (query, key, gamma, tau)), None, None, None, *options
        )
    found = dispatcher.search_operator(query, key, gamma, tau, None, None, None, *options)
    assert [(x.shape, x.dtype) for x in declared] == [(x.shape, x.dtype) for x in found]
    assert len(found) == (12 if with_stats else 5)


@pytest.mark.parametrize("with_stats", [False, True])
def test_operator_gives_the_search_inside_a_compilation(with_stats):
    # CUDA's way; here plain code stands behind the operator
    query, key = structured_inputs(torch.Generator().manual_seed(18), 1, 4, 2, 200, 230, 32)
    gamma, tau = torch.tensor([0.5, 0.3, 1.0, 0.8], dtype=torch.float64), torch.tensor(0.1, dtype=torch.float64)
    config = FlexPrefillConfig(tau=0.5, block_size=16, min_budget=0)
    inputs = AttentionInputs(query, key, None, 0.2)
    inside = torch.compile(dispatcher._as_one_operator, fullgraph=True, backend="aot_eager")
    found = inside(inputs, config, gamma, tau, with_stats, with_stats)
    expected = dispatcher.plain_search(inputs, config, gamma, tau, with_stats, with_stats)
    assert all(torch.equal(*pair) for pair in zip(found.lists, expected.lists, strict=True))
    if with_stats:
        assert torch.equal(found.keep, expected.keep)
        assert all(same_values(*pair) for pair in zip(found.stats, expected.stats, strict=True))
    else:
        assert found.keep is None and found.stats is None
