"""The fast path against the reference, also without float64; a window that is none; large maps; NaN by kernels and plainly."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

import flexmask
from flexmask.base import blocks
from flexmask.base.inputs import attention_inputs
from flexmask.base.scores import top_p, widest_float
from flexmask.method import method_of
from flexmask.selection import prepare, select
from flexmask.selection.prepare import prepare_selection
from tests.attention_calls import call
from tests.cases import Case, Config, cases, published_cases, sparse_cases, structured_inputs
from tests.comparisons import assert_as_the_oracle, assert_consistent, assert_same_stats, compare_drawn
from tests.compile_support import assert_same_lists


def test_equals_the_reference_also_where_blocks_are_dropped():
    compare_drawn(cases(), 120)
    compare_drawn(sparse_cases(), 50).check_kinds()
    compare_drawn(published_cases(max_budget=None), 60).check_kinds()


@settings(max_examples=15)
@given(published_cases())
def test_published_equals_the_reference_where_shares_underflow(case):
    case.scores = {"scale": 3.0}
    result = case.select()
    assert_as_the_oracle(result, case.reference(), underflow=True)
    # near float32's smallest number underflow depends on the order of a sum
    underflown = result.stats.js_distance.isnan()
    assert not (underflown & result.stats.is_query_aware).any()


@pytest.mark.parametrize("tau", [0.0, 1.0])
def test_published_keeps_every_block_at_gamma_one(tau):
    # the running sum exceeds the number of blocks by rounding
    for seed in range(4):
        query, key = structured_inputs(torch.Generator().manual_seed(seed), 1, 4, 2, 1280, 1280, 32, sharpness=5.0)
        result = Case(query, key, Config(1.0, tau, min_budget=0, method="published")).select()
        assert (result.stats.density == 1).all()


@pytest.mark.parametrize("method", ["flexprefill", "hybrid"])
def test_every_window_around_the_edges_of_blocks_equals_the_reference(method):
    for window in range(30, 52):
        case = call(q_len=91, kv_len=139, heads=(2, 1), scores={"window": window}, method=method, tau=0.5, row_stride=4)
        assert_as_the_oracle(case.select(), case.reference())


@settings(max_examples=40)
@given(cases() | cases(method="hybrid", row_stride=16), st.sampled_from([1, 2, 2**63]))
def test_window_of_all_tokens_or_more_is_none(case, times):
    length = case.key.shape[2]
    # a longer prompt has rows that such a window cuts
    keywords = {**case.keywords(), "prompt_len": None, "return_stats": True}
    (mask, stats), (none, none_stats) = (
        case.config.mask(case.query, case.key, **{**keywords, "window": window})
        for window in (min(times * length, 2**63 - 1), None)
    )
    assert_same_lists(mask, none)
    assert_consistent(mask, (case.query.shape[2], length))
    assert_same_stats(stats, none_stats)


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


class NoFloat64(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(x, torch.Tensor) and x.dtype == torch.float64:
                raise TypeError(f"{func} gave float64")
        return out


def test_selection_needs_no_float64_where_there_is_none(monkeypatch):
    found = {name: widest_float(torch.device(name)) for name in ("cpu", "cuda", "mps")}
    assert found == {"cpu": torch.float64, "cuda": torch.float64, "mps": torch.float32}
    for module in (prepare, blocks):
        monkeypatch.setattr(module, "widest_float", lambda device: torch.float32)

    def selected(case):
        with NoFloat64():
            return case.select()

    compare_drawn(cases() | published_cases() | cases(method="hybrid", row_stride=16), 40, selected)


@pytest.mark.parametrize("precision", [torch.float32, torch.float64])
@pytest.mark.parametrize("gamma", [0.9, 0.99])
def test_a_large_map_reaches_gamma(gamma, precision):
    """A running float32 sum stops growing before it has added a million small shares."""
    values = torch.rand(1, 1_000_000) * 1e-3
    kept = top_p(values, torch.ones_like(values).bool(), torch.tensor(gamma, dtype=precision))
    heaviest = values.double().sort(descending=True).values
    running = heaviest.cumsum(-1) - heaviest
    assert kept.sum().item() == pytest.approx(int((running < gamma * heaviest.sum()).sum()), abs=2)
    assert values[kept].min() >= values[~kept].max()


def test_plain_steps_do_not_take_the_output_s_memory(monkeypatch):
    """A warm-up has none, and for an argument more they would be compiled again in a request."""
    taken = []

    def run(prepared, inputs, *rest):
        taken.append(inputs.out)
        return run_plain(prepared, inputs, *rest)

    run_plain = select.run_plain
    monkeypatch.setattr(select, "run_plain", run)
    query, key = torch.randn(1, 2, 200, 16), torch.randn(1, 1, 200, 16)
    inputs = attention_inputs(query, key, key).for_attention().with_fields(out=torch.empty_like(query))
    select.select_blocks(prepare_selection(method_of("hybrid", 16, {}).for_inputs(inputs), inputs), inputs)
    assert taken == [None]
