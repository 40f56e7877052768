"""Heads that dense attention serves because it is faster, and those that stay under their mask."""

import pytest
import torch
from torch import Tensor

from flexmask import flexprefill_mask, sparse_attention
from flexmask.attend import attend, run_options
from flexmask.base.inputs import attention_inputs
from flexmask.block_masks import causal_mask
from flexmask.dense_policy import CPU_BREAK_EVEN, DensePolicy, by_head_dim, has_causal_kernel, plan_of_reason
from flexmask.flex import heads
from flexmask.flex.dense import dense_attention
from flexmask.select import select_blocks
from flexmask.selector import selector_of
from flexmask.stats import STATISTICS
from tests.attention_calls import flexprefill_attention
from tests.cases import structured_inputs
from tests.compile_support import dense_under, traced
from tests.compile_support import fresh_compiler as fresh_compiler

LENGTH = 240
MASK_OPTIONS = {"tau": 0.0, "block_size": 16, "min_budget": 0}
OPTIONS = {**MASK_OPTIONS, "dense_below": 100, "return_stats": True}
# the second key head's heads keep everything
GAMMAS = (0.3, 1.0, 1.0, 1.0)


def inputs() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(18)
    query, key = structured_inputs(generator, 1, 4, 2, LENGTH, LENGTH, 32, sharpness=5.0)
    return query, key, torch.randn(1, 2, LENGTH, 32, generator=generator)


def dense(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return dense_attention(attention_inputs(query, key, value))[0]


def plan_of(method="flexprefill", dense_below=100, return_lse=False, tensors=None, fields=None, **options):
    given = attention_inputs(*(tensors or inputs()), **(fields or {}))
    selector = selector_of(method, 16, options).for_inputs(given)
    return DensePolicy(dense_below).plan(given, selector, return_lse)


@pytest.fixture
def listed(monkeypatch):
    """Blocks per head of each call of the sparse kernel."""
    calls = []
    run = heads.run_flex_attention

    def counting(part, mask, *rest):
        calls.append((mask.kv_num_blocks + mask.full_kv_num_blocks).sum((0, 2)).tolist())
        return run(part, mask, *rest)

    monkeypatch.setattr(heads, "run_flex_attention", counting)
    return calls


KEEPS_ALL = "every head keeps every block"


@pytest.mark.parametrize(
    ("gamma", "options", "expected"),
    [
        (GAMMAS, {}, [False, True]),
        ((1, 1, 0.99, 1), {}, [True, False]),
        ((0.99, 1, 1, 0.99), {}, [False, False]),
        ((1.0,) * 4, {}, KEEPS_ALL),
        (1.0, {}, KEEPS_ALL),
        (1.0, {"method": "hybrid"}, KEEPS_ALL),
        (GAMMAS, {"method": "hybrid"}, [False, True]),
        (0.99, {}, [False, False]),
        (torch.ones(4), {}, [False, False]),  # its values are not read
        ((1.0,) * 4, {"max_budget": 32, "min_budget": 0}, [False, False]),
        (1.0, {"method": "published"}, [False, False]),
    ],
    ids=str,
)
def test_heads_that_keep_everything_are_known_by_key_head(gamma, options, expected):
    plan = plan_of(gamma=gamma, **options)
    if expected == KEEPS_ALL:
        assert plan == (KEEPS_ALL, [True, True], None)
    else:
        assert plan == (None, expected, CPU_BREAK_EVEN[torch.float32])


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"dense_below": 241}, ("240 tokens < dense_below 241", [True, True], None)),
        ({"dense_below": 240}, (None, [False, True], 0.66)),
        # switched off
        ({"dense_below": 0}, (None, [False, False], None)),
        ({"dense_below": 0, "gamma": 1.0}, (None, [False, False], None)),
        # SDPA gives none
        ({"return_lse": True}, (None, [False, False], None)),
        ({"return_lse": True, "gamma": 1.0}, (None, [False, False], None)),
    ],
    ids=str,
)
def test_what_the_call_says_comes_first(changes, expected):
    assert plan_of(**{"gamma": GAMMAS, **changes}) == expected


def test_a_single_row_is_dense_whatever_it_follows():
    query, key, value = inputs()
    for dense_below in (0, 100):
        plan = plan_of(tensors=(query[:, :, -1:], key, value), dense_below=dense_below, gamma=0.5)
        assert plan == ("1 rows < 2", [True, True], None)


def test_gradients_keep_single_heads_sparse():
    tensors = tuple(x.requires_grad_() for x in inputs())
    with torch.enable_grad():  # fresh_compiler's tests run without
        assert plan_of(tensors=tensors, gamma=GAMMAS) == (None, [False, False], None)
        assert plan_of(tensors=tensors, gamma=1.0).reason == KEEPS_ALL


def test_lists_are_not_read_of_a_users_mask():
    given = attention_inputs(*inputs())
    selector = selector_of(lambda *tensors, **options: causal_mask(*tensors, **options), 16, {}).for_inputs(given)
    assert DensePolicy(100).plan(given, selector) == (None, [False, False], None)


@pytest.mark.parametrize(
    "options",
    [
        {"softcap": 20.0},
        {"window": 100},
        {"attention_mask": torch.ones(1, LENGTH, dtype=torch.bool)},
        {"q_offset": 0},
        {"sinks": torch.zeros(4)},
    ],
    ids=lambda options: next(iter(options)),
)
def test_only_whole_plain_prompts_have_dense_heads(without_kernel, options):
    assert has_causal_kernel(attention_inputs(*inputs()))
    query, key, value = inputs()
    assert plan_of(tensors=(query[:, :, 100:], key, value), gamma=GAMMAS) == (None, [False, False], None)
    assert plan_of(fields=options, gamma=GAMMAS) == (None, [False, False], None)
    assert plan_of(fields=options, gamma=1.0) == (None, [False, False], None)
    _, stats = flexprefill_attention(*inputs(), gamma=GAMMAS, **OPTIONS, **options)
    assert not stats.is_dense.any() and len(without_kernel) == 1


@pytest.mark.attention
@pytest.mark.parametrize("at_once", [2**30, 1], ids=["all heads", "head by head"])
def test_heads_at_gamma_one_run_dense_and_others_under_their_mask(monkeypatch, listed, at_once):
    monkeypatch.setitem(CPU_BREAK_EVEN, torch.float32, 2.0)
    query, key, value = inputs()
    out, stats = flexprefill_attention(query, key, value, gamma=GAMMAS, **OPTIONS, max_mask_bytes=at_once)
    mask, found = flexprefill_mask(query, key, GAMMAS, **MASK_OPTIONS, return_stats=True)
    whole = dense(query, key, value)
    if at_once == 1:  # torch 2.8 rounds a head by itself otherwise
        each = [dense(query[:, head : head + 1], *(x[:, head // 2 : head // 2 + 1] for x in (key, value))) for head in range(4)]
        whole = torch.cat(each, 1)
    assert stats.is_dense.tolist() == [[False, False, True, True]]
    assert torch.equal(out[:, 2:], whole[:, 2:])
    torch.testing.assert_close(out, dense_under(mask, query, key, value), atol=2e-5, rtol=0)
    assert (out[:, 0] - whole[:, 0]).abs().max() > 0.01
    for name in ("density", "coverage", "num_slash_blocks", "js_distance"):
        torch.testing.assert_close(getattr(stats, name), getattr(found, name))
    blocks = [sum(by_head) for by_head in zip(*listed, strict=True)]
    assert len(listed) == (2 if at_once == 1 else 1)
    assert min(blocks) > 0 if at_once == 1 else blocks[1] > blocks[0] > 0 == sum(blocks[2:])


@pytest.mark.attention
def test_heads_above_the_break_even_of_a_cpu_run_dense(monkeypatch, listed):
    query, key, value = inputs()
    gammas = (0.2, 0.3, 0.95, 0.99)
    mask, found = flexprefill_mask(query, key, gammas, **MASK_OPTIONS, return_stats=True)
    shares = found.density.unflatten(1, (2, 2)).mean(2)[0].tolist()
    assert shares[0] + 0.1 < shares[1] < 0.97
    monkeypatch.setitem(CPU_BREAK_EVEN, torch.float32, shares[1] - 0.05)
    out, stats = flexprefill_attention(query, key, value, gamma=gammas, **OPTIONS)
    under, whole = dense_under(mask, query, key, value), dense(query, key, value)
    assert stats.is_dense.tolist() == [[False, False, True, True]]
    assert torch.equal(out[:, 2:], whole[:, 2:])
    torch.testing.assert_close(out[:, :2], under[:, :2], atol=2e-5, rtol=0)
    assert (out - under)[:, 2:].abs().max() > 1e-4
    assert torch.equal(stats.density, found.density)
    assert listed[0][2:] == [0, 0]
    assert min(listed[0][:2]) > 0
    monkeypatch.setitem(CPU_BREAK_EVEN, torch.float32, shares[1] + 0.01)
    assert not flexprefill_attention(query, key, value, gamma=gammas, **OPTIONS)[1].is_dense.any()


def test_share_of_a_key_head_is_that_of_its_query_heads():
    query, key, _ = (x.expand(3, -1, -1, -1) for x in inputs())
    given, seen = attention_inputs(query, key), set()
    for gamma in (0.2, 0.7, 0.9, 0.95, 1.0):
        selector = selector_of("flexprefill", 16, {"gamma": gamma, "tau": 0.0, "min_budget": 0}).for_inputs(given)
        selected = select_blocks(selector, given, statistics=("density",))
        shares = selected.stats["density"].mean(0).unflatten(0, (2, 2)).mean(1)
        for limit in CPU_BREAK_EVEN.values():
            more = heads._keeps_more(selected.lists, 2, limit)
            assert more == (shares > limit).tolist()
            seen.add(tuple(more))
    assert {(False, False), (True, True)} < seen


@pytest.mark.parametrize("gamma", [1.0, (1.0,) * 4], ids=["one number", "by head"])
@pytest.mark.parametrize("method", ["flexprefill", "hybrid"])
def test_a_call_at_gamma_one_is_dense(listed, method, gamma):
    query, key, value = inputs()
    options = {name: OPTIONS[name] for name in OPTIONS if name != "tau" or method != "hybrid"}
    out, stats = sparse_attention(query, key, value, method, gamma=gamma, **options)
    assert stats.dense
    assert stats.is_dense.all()
    assert torch.equal(out, dense(query, key, value))
    assert not listed


@pytest.mark.attention
@pytest.mark.parametrize(("window", "sparse_calls"), [(None, 0), (100, 1)], ids=["SDPA's causal kernel", "a mask of all blocks"])
def test_a_call_that_runs_dense_for_a_reason_attends_to_all_it_sees(listed, window, sparse_calls):
    given = attention_inputs(*inputs(), window=window)
    selector = selector_of("hybrid", 16, {"gamma": 0.3, "min_budget": 0}).for_inputs(given)
    plan = plan_of_reason("in dense_layers", given, over_blocks=True)
    with torch.no_grad():
        found = attend(given, selector, run_options(), plan, statistics=STATISTICS, with_maps=True)
    torch.testing.assert_close(found.out, dense_attention(given)[0], atol=2e-5, rtol=0)
    assert (len(listed), len(found.selections)) == (sparse_calls, sparse_calls)
    assert found.stats.dense and found.stats.is_dense.all()
    assert (found.stats.density == 1).all() and (found.stats.coverage == 1).all()


@pytest.mark.parametrize("sizes", [(16, 512), (513, 64), (64, 15)])
def test_head_sizes_without_a_mask_are_named(sizes):
    names = {513: "head_dim 513 outside 16 to 512", 15: "v_head_dim 15 outside 16 to 512"}
    assert by_head_dim(*sizes) == next((names[size] for size in sizes if size in names), None)


def test_wide_heads_run_dense_where_gradients_are_needed():
    assert by_head_dim(512, 128, needs_grad=True) == "head_dim 512 over 256, with gradients"
    assert by_head_dim(128, 257, needs_grad=True) == "v_head_dim 257 over 256, with gradients"
    assert by_head_dim(256, 256, needs_grad=True) is None
    assert by_head_dim(512, 512) is None


@pytest.mark.gpu
def test_heads_at_gamma_one_run_dense_on_a_gpu(cuda, listed):
    query, key, value = (x.to(cuda) for x in inputs())
    options = {**OPTIONS, "block_size": 64}
    with torch.no_grad():
        out, stats = flexprefill_attention(query, key, value, gamma=GAMMAS, **options)
    assert stats.is_dense.tolist() == [[False, False, True, True]]
    mask = flexprefill_mask(query, key, GAMMAS, tau=0.0, block_size=64, min_budget=0)
    torch.testing.assert_close(out, dense_under(mask, query, key, value), atol=2e-5, rtol=0)
    assert listed[0][2:] == [0, 0]


@pytest.mark.gpu
def test_gradients_go_through_the_sparse_kernel(cuda):
    query, key, value = (x.to(cuda).requires_grad_() for x in inputs())
    grads = []
    for dense_below in (100, 0):
        options = {**OPTIONS, "block_size": 64, "dense_below": dense_below}
        with torch.enable_grad():
            out, stats = flexprefill_attention(query, key, value, gamma=GAMMAS, **options)
            assert not stats.is_dense.any()
            grads.append(torch.autograd.grad(out.square().sum(), (query, key, value)))
    for pair in zip(*grads, strict=True):
        torch.testing.assert_close(*pair, atol=1e-4, rtol=1e-4)


def test_in_a_surrounding_compilation_every_head_runs_sparse(monkeypatch):
    # the counting backend stands for Inductor
    monkeypatch.setattr("flexmask.flex.run.runs_flex_attention_uncompiled", lambda: False)
    run, counter = traced(lambda *tensors: flexprefill_attention(*tensors, gamma=GAMMAS, **OPTIONS)[1].is_dense)
    assert not run(*inputs()).any()
    assert counter.frame_count == 1


def test_the_policy_counts_from_dense_below_on():
    policy = DensePolicy(dense_below=100, least_rows=16, dense_layers=(3,))
    assert policy.by_layer(0, 100) is policy.by_layer(0, None) is policy.by_size(16, 100) is None
    assert policy.by_layer(0, 99) == "sliding window 99 < dense_below 100"
    assert policy.by_layer(3, None) == "in dense_layers"
    assert policy.by_size(16, 99) == "99 tokens < dense_below 100" and policy.by_size(15, 100) == "15 rows < 16"
