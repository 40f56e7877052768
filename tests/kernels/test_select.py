"""Methods by Triton kernels against the oracle, in the interpreter."""

import inspect
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from flexmask import block_masks
from flexmask.base.inputs import attention_inputs
from flexmask.selection.operator import run_operator
from flexmask.selection.prepare import PreparedSelection, prepare_selection
from flexmask.selection.select import select_blocks
from flexmask.stats import FROM_LISTS, STATISTICS
from tests.attention_calls import call, padding
from tests.cases import Case, Config, by_kernels, cases, lower_thresholds, sparse_cases, structured_inputs
from tests.comparisons import assert_as_the_oracle, assert_equal_lists, assert_same_blocks, assert_same_stats, compare_drawn
from tests.compile_support import assert_same_lists, default_dtype, set_to, traced

pytest.importorskip("triton")

from flexmask.block_masks import hybrid
from flexmask.block_masks.flexprefill import map_top_p_kernels
from flexmask.kernels import launch

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="where there is a GPU, kernels run there")


@pytest.fixture(autouse=True)
def _small_tiles(monkeypatch):
    """The interpreter would take seconds for 64 chunks of rows per pass, and for prompts of more than 512 key blocks."""
    # and some maps of each size
    for name, value in {"_MEDIUM": (5, 4), "_LARGE": (3, 4), "SMALL_MAP": 64, "MEDIUM_MAP": 144}.items():
        monkeypatch.setattr(map_top_p_kernels, name, value)
    monkeypatch.setattr(hybrid.kernels, "_COLUMNS", 32)


@pytest.fixture
def _poisoned():
    """Uninitialized memory holds NaN, the largest number or True."""
    with set_to(1, torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode):
        assert torch.utils.deterministic.fill_uninitialized_memory and torch.empty(100).isnan().all()
        yield


poisoned = pytest.mark.usefixtures("_poisoned")


def selected(case):
    with by_kernels():
        return case.select()


@poisoned
def test_equals_the_oracle():
    short = cases(st.sampled_from([1, 15, 63, 129]) | st.integers(1, 160), [16, 32, 48], [0.43, 0.71, 0.91, 1.0], (0, 1, 4))
    # few cases are drawn: the calls below drop blocks and have query-aware heads, whatever these do
    for drawn in (short, sparse_cases(max_blocks=14)):
        compare_drawn(drawn, 4, selected)
    with lower_thresholds(0.2):
        compare_drawn(cases(st.integers(60, 160), [16], budgets=(0, 3), method="hybrid", row_stride=4), 5, selected)


EVERYTHING = {"gamma": 0.7, "tau": 0.5, "block_size": 16, "min_budget": 0, "row_stride": 4}
QUERY_AWARE = {"gamma": 0.43, "tau": 0.6}
CHUNK: dict[str, Any] = {
    "q_len": 150, "kv_len": 190, "batch": 2, "attention_mask": padding(190, ("left", 0), ("left", 37)),
    "q_offset": torch.tensor([3, 40]), "scores": {"window": 150, "softcap": 20.0}, "sharpness": 5.0,
}  # fmt: skip
# a window at the edge of a block shows or fills another block with every key
EDGES: dict[str, Any] = {"q_len": 91, "kv_len": 139, "heads": (2, 1), **QUERY_AWARE}
MANY_BLOCKS: dict[str, Any] = {
    "method": "hybrid", "last_rows_dense": False, "q_len": 40, "kv_len": 1200, "heads": (2, 1), "head_dims": (16, 16),
}  # fmt: skip
CALLS: dict[str, dict[str, Any]] = {
    "one row of one key": {"q_len": 1},
    "one row of a block of 256": {"q_len": 1, "kv_len": 33, "block_size": 256},
    "flatten": {**CHUNK, **QUERY_AWARE, "heads": (4, 1)},
    "per_query, middle rows, a floor": {
        **CHUNK, **QUERY_AWARE, "heads": (3, 1), "query_aware": "per_query", "pattern_queries": "middle", "min_budget": 16,
    },
    "capped": {**CHUNK, **QUERY_AWARE, "max_budget": 48},
    # the last of the kept lines hold next to nothing
    "capped, all of the sum": {
        "q_len": 160, "tau": 0.6, "gamma": [0.43, 1.0, 0.91, 1.0], "max_budget": 48, "scores": {"scale": 2.0},
    },
    "by head, flatten": {**CHUNK, "tau": 0.6, "gamma": [0.31, 1.0, 0.91, 0.43]},
    "by head, per_query": {**CHUNK, "tau": 0.6, "query_aware": "per_query", "gamma": [1.0, 0.61, 0.31, 0.83]},
    **{f"window of {window}": {**EDGES, "scores": {"window": window}} for window in (47, 48, 49)},
    **{
        f"hybrid, window of {window}": {**EDGES, "method": "hybrid", "row_stride": 1, "scores": {"window": window}}
        for window in (47, 48)
    },
    **{
        f"{method}, a window of more than all tokens": {
            "method": method, "q_len": 76, "kv_len": 96, "batch": 2, "sharpness": 5.0, "scores": {"window": 2**40},
            "attention_mask": padding(96, ("left", 48), ("left", 5)), "q_offset": torch.tensor([20, 3]), "last_rows_dense": False,
        }
        for method in ("flexprefill", "hybrid")
    },
    "window of 49, padded": {**EDGES, "scores": {"window": 49}, "attention_mask": padding(139, ("holes", 7))},
    "a map of many columns": {"q_len": 140, "kv_len": 2300, "heads": (2, 1), **QUERY_AWARE},
    "blocks of 48": {"q_len": 200, "kv_len": 240, "block_size": 48, "head_dims": (24, 24), **QUERY_AWARE},
    "blocks of 128": {"q_len": 600, "block_size": 128, "head_dims": (128, 128), "heads": (2, 1)},
    "heads of 512": {"q_len": 130, "head_dims": (512, 512), "heads": (2, 1)},
    "a high soft cap": {"q_len": 200, "head_dims": (16, 16), "scores": {"softcap": 1e8}},
    "half precision": {"q_len": 200, "dtype": torch.float16},
    "hybrid, every row": {"method": "hybrid", "q_len": 150, "heads": (8, 1), "row_stride": 1},
    "hybrid, one row of a block": {"method": "hybrid", "q_len": 150, "heads": (6, 2), "row_stride": 16},
    "hybrid, half precision": {"method": "hybrid", "q_len": 200, "dtype": torch.float16, "sharpness": 5.0},
    "hybrid, heads of 512": {"method": "hybrid", "q_len": 130, "head_dims": (512, 512), "heads": (2, 1)},
    # from 33 key blocks on some tiles touch no edge
    "hybrid, whole tiles": {
        "method": "hybrid", "q_len": 200, "kv_len": 700, "heads": (3, 1), "min_budget": 40,
        "scores": {"window": 640, "softcap": 4.0},
    },
    # more key blocks than a program reads at once
    "hybrid, a floor of few halvings": {**MANY_BLOCKS, "gamma": (0.5, 0.98), "min_coverage": 0.2},
    "hybrid, a floor of many halvings": {**MANY_BLOCKS, "gamma": (0.3, 0.9), "min_coverage": 0.7},
    "hybrid, padding far from every edge": {
        "method": "hybrid", "q_len": 200, "kv_len": 700, "heads": (2, 1), "attention_mask": padding(700, ("left", 12)),
    },
}  # fmt: skip
LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "tokens first": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "every third of more tokens": lambda x: x.repeat_interleave(3, 2)[:, :, ::3],
    "every other number": lambda x: x.repeat_interleave(2, 3)[..., ::2],
}


@poisoned
@pytest.mark.parametrize("name", CALLS)
def test_masks_equal_those_of_the_plain_steps(name):
    case = call(**{"gamma": 0.5, "tau": 0.1, "row_stride": 4, **CALLS[name]})
    plain, expected, found = case.select(), case.reference(), selected(case)
    if case.query.dtype == torch.float32:
        assert_as_the_oracle(found, expected)
        assert_equal_lists(found, plain)
    else:
        assert_same_blocks(found, expected)
        assert_same_blocks(plain, expected)
        assert_same_stats(plain.stats, case.select(case.query.float(), case.key.float()).stats)
    assert (expected.margin > 1e-5).float().mean() > 0.6
    assert case.key.shape[2] < 64 or (found.stats.density < 1).any()
    assert "tau" not in CALLS[name] or found.stats.is_query_aware.any() or "window" in name


@poisoned
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("method", ["flexprefill", "hybrid"])
@pytest.mark.parametrize("chosen", [selected, Case.select], ids=["kernels", "plain steps"])
def test_strides_and_what_padding_holds_change_nothing(chosen, method, layout):
    mask = padding(100, ("left", 21))
    case = call(q_len=60, kv_len=100, heads=(2, 1), attention_mask=mask, method=method, tau=0.3, row_stride=4, sharpness=5.0)
    expected = case.select()
    case.key = LAYOUTS[layout](case.key.masked_fill((mask == 0)[:, None, :, None], float("nan")))
    case.query = LAYOUTS[layout](case.query)
    assert_equal_lists(chosen(case), expected)


@pytest.mark.filterwarnings("ignore:All-NaN slice:RuntimeWarning")  # of the interpreter
@pytest.mark.parametrize("method", ["flexprefill", "hybrid"])
def test_a_head_with_nan_keeps_what_it_keeps_by_the_plain_steps(method):
    """A maximum drops NaN on a GPU."""
    case = call(q_len=100, method=method, row_stride=4)
    case.query[0, 1, [64, 95]] = torch.nan
    plain, found = case.select(), selected(case)
    assert_equal_lists(found, plain)
    assert torch.equal(found.stats.coverage.isnan(), plain.stats.coverage.isnan())
    assert found.stats.coverage.isnan().any()


STATES = {"as stored on AMD": lambda: mock.patch("torch.version.hip", "6.4"), "bfloat16": lambda: default_dtype(torch.bfloat16)}


@pytest.mark.parametrize("state", STATES.values(), ids=STATES)
@pytest.mark.parametrize("method", ["flexprefill", "hybrid"])
def test_neither_the_default_dtype_nor_how_amd_stores_masks_changes_the_lists(method, state):
    case = call(q_len=60, kv_len=140, heads=(2, 1), method=method, tau=0.5, row_stride=4)
    expected = selected(case)
    with state():
        found = selected(case)
    assert_equal_lists(found, expected)
    assert_same_stats(found.stats, expected.stats)


@pytest.mark.parametrize("maps", [(16, 16), (0, 16), (0, 0), "per_query", "hybrid"], ids=str)
def test_kernels_are_specialized_on_strides_only(monkeypatch, maps):
    """Of another number that is not in `DO_NOT_SPECIALIZE`, 1 and multiples of 16 compile a kernel again."""
    specialized, run = set(), launch.Kernel._launch

    def noted(self, grid, *arguments, **constants):
        for parameter, value in zip(inspect.signature(self.jit.fn).parameters.values(), arguments, strict=False):
            if (
                type(value) is int
                and "constexpr" not in str(parameter.annotation)
                and parameter.name not in launch.DO_NOT_SPECIALIZE
            ):
                specialized.add(parameter.name)
        run(self, grid, *arguments, **constants)

    monkeypatch.setattr(launch.Kernel, "_launch", noted)
    options = {"per_query": {"query_aware": "per_query"}, "hybrid": {"method": "hybrid"}}.get(maps, {})
    if not options:
        for name, most in zip(("SMALL_MAP", "MEDIUM_MAP"), maps, strict=True):
            monkeypatch.setattr(map_top_p_kernels, name, most)
    selected(call(q_len=64, tau=1.0, heads=(2, 1), **options))
    assert {name for name in specialized if "stride_" not in name} == set() != specialized


@pytest.mark.parametrize("method", ["flexprefill", "hybrid"])
def test_a_padding_mask_of_any_layout_is_read_row_by_row(method):
    query, key = torch.randn(3, 2, 90, 16), torch.randn(3, 1, 90, 16)
    mask = torch.rand(3, 90, generator=torch.Generator().manual_seed(2)) < 0.8
    make, options = getattr(block_masks, f"{method}_mask"), {"gamma": 0.5, "block_size": 16, "min_budget": 0}
    with by_kernels():
        made = [make(query, key, attention_mask=each, **options).to_dense() for each in (mask, mask.t().contiguous().t())]
    assert torch.equal(*made)


# Inside of a caller's torch.compile the kernels are one operator, flexmask::select
@pytest.mark.parametrize("method", ["flexprefill", "hybrid"])
def test_operator_takes_a_plan_that_was_made_before_the_compilation(method):
    query, key = torch.randn(2, 4, 50, 16), torch.randn(2, 2, 70, 16)
    inputs = attention_inputs(query, key).with_offset()
    checked = Config(**EVERYTHING, method=method).checked_method
    with by_kernels():
        prepared = prepare_selection(checked.for_inputs(inputs), inputs)
        assert isinstance(prepared.method_for_steps.gamma, float) and 0 < prepared.method_for_steps.gamma < 1
        found = run_operator(prepared, inputs, False, ())
        expected = select_blocks(prepared, inputs)
    assert all(map(torch.equal, found.lists, expected.lists))


@pytest.mark.parametrize("method", ["flexprefill", "hybrid"])
@pytest.mark.parametrize(("with_map", "statistics"), [(False, ()), (False, FROM_LISTS), (True, STATISTICS)], ids=str)
def test_operator_has_the_shapes_that_it_declares(method, with_map, statistics):
    def outcome(query, key):
        inputs = attention_inputs(query, key).with_offset()
        fitted = Config(**EVERYTHING, method=method).checked_method.for_inputs(inputs)
        found = run_operator(PreparedSelection(fitted, fitted, True), inputs, with_map, statistics)
        assert tuple(found.stats) == statistics
        tensors = [*found.lists, *found.stats.values(), *([] if found.keep is None else [found.keep])]
        return [(x.shape, x.dtype, x.stride()) for x in tensors]

    query, key = torch.randn(2, 4, 50, 16), torch.randn(2, 2, 70, 16)
    with by_kernels():
        found = outcome(query, key)
        with FakeTensorMode() as mode:
            declared = outcome(mode.from_tensor(query), mode.from_tensor(key))
    assert declared == found and len(found) == 4 + with_map + len(statistics)


@pytest.mark.parametrize(
    "options",
    [
        {"gamma": [0.5, 1.0], "max_budget": 80, "query_aware": "per_query", "index_queries": "middle"},
        {"method": "hybrid", "gamma": 0.8, "min_budget": 16, "min_coverage": 0.5},
    ],
    ids=["flexprefill", "hybrid"],
)
def test_operator_gives_the_mask_inside_a_compilation(options):
    query, key = structured_inputs(torch.Generator().manual_seed(18), 2, 2, 1, 100, 130, 32, sharpness=5.0)
    given = {"window": 110, "softcap": 20.0, "attention_mask": padding(130, ("left", 20), ("left", 0)), "return_stats": True}
    config = Config(**{**EVERYTHING, **options})
    operators = []

    def mask(query, key):
        return config.mask(query, key, **given)

    def seen(graph, example_inputs):
        operators.extend(node for node in graph.graph.nodes if "flexmask" in str(node.target))
        return graph

    run, counter = traced(mask, seen)
    with by_kernels():
        (found, stats), (expected, expected_stats) = run(query, key), mask(query, key)
    assert [str(node.target) for node in operators] == ["flexmask.select.default"] and counter.frame_count == 1
    # Inductor writes it into a comment of the code that it generates for GPUs
    assert "\n" not in operators[0].format_node()
    assert_same_stats(stats, expected_stats)
    assert_same_lists(found, expected)
    assert torch.equal(found.to_dense(), expected.to_dense())
