"""The dense path: its output and log-sum-exp, the calls and the heads that take it, and those that stay under their mask."""

import pytest
import torch
from torch import Tensor

from flexmask import SelectionStats, flexprefill_mask, sparse_attention
from flexmask.base.inputs import attention_inputs
from flexmask.block_masks import causal_mask
from flexmask.dense_policy import CPU_BREAK_EVEN, head_dim_reason
from flexmask.flex.dense import dense_attention, sdpa
from tests.attention_calls import call, flexprefill_attention, padding
from tests.comparisons import assert_same_attention
from tests.compile_support import dense_under
from tests.compile_support import fresh_compiler as fresh_compiler
from tests.expected import masked_attention


@pytest.mark.parametrize(
    "keywords",
    [
        {"q_len": 100}, {"q_len": 60, "kv_len": 100}, {"q_len": 60, "kv_len": 100, "q_offset": 13},
        {"q_len": 100, "attention_mask": padding(100, ("left", 30), ("all", 0)), "batch": 2},
        {"q_len": 100, "scores": {"window": 17, "scale": 0.4}}, {"q_len": 100, "scores": {"softcap": 2.0}},
        {"q_len": 60, "kv_len": 100, "scores": {"softcap": 2.0, "window": 9}, "attention_mask": padding(100, ("holes", 5))},
        {"q_len": 100, "heads": (3, 1), "head_dims": (32, 80), "dtype": torch.bfloat16}, {"q_len": 1, "kv_len": 100},
        {"q_len": 1, "kv_len": 100, "scores": {"softcap": 2.0}, "q_offset": torch.tensor(40)},
        {"q_len": 1, "kv_len": 100, "attention_mask": padding(100, ("left", 30), ("right", 3)), "batch": 2},
    ],
)  # fmt: skip
def test_short_prompts_and_single_rows_run_dense(keywords):
    case = call(**keywords)
    decodes = keywords["q_len"] == 1
    below = {} if decodes else {"dense_below": 101}
    expected, lse = case.under(torch.ones_like(case.select().keep))
    out, stats = case.attend(return_stats=True, **below)
    assert stats.dense is True and (stats.density == 1).all()
    assert (stats.coverage == 1).all() and stats.js_distance.isnan().all()
    assert not stats.is_query_aware.any() and out.dtype == case.query.dtype
    assert_same_attention(out, expected)
    again, got, more = case.attend(return_lse=True, return_stats=True, **below)
    assert isinstance(more, SelectionStats)
    assert_same_attention(again, expected)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.double(), lse, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("keywords", [{"return_lse": True}, {"return_stats": True}], ids=["written out", "SDPA"])
def test_dense_in_parts_is_dense_in_one(monkeypatch, keywords):
    scores = {"window": 40} if "return_stats" in keywords else {"softcap": 2.0, "window": 40}
    case = call(q_len=70, kv_len=100, scores=scores, attention_mask=padding(100, ("left", 50)))
    whole = case.attend(dense_below=101, **keywords)
    # 13 rows at a time
    for name, most in (("_MAX_SCORES", case.query.shape[1] * 100 * 13), ("_MAX_VISIBLE", 100 * 13)):
        monkeypatch.setattr(f"flexmask.flex.dense.{name}", most)
    parts = case.attend(dense_below=101, **keywords)
    torch.testing.assert_close(parts[0], whole[0], atol=1e-6, rtol=0)
    if "return_lse" in keywords:
        torch.testing.assert_close(parts[1], whole[1], atol=1e-6, rtol=0)


@pytest.mark.gpu
def test_float32_grouped_heads_write_out_no_scores(cuda):
    tokens = 8192
    query, key, value = (torch.randn(1, heads, tokens, 64, device=cuda) for heads in (16, 4, 4))
    torch.cuda.reset_peak_memory_stats(cuda)
    before = torch.cuda.memory_allocated(cuda)
    out = flexprefill_attention(query, key, value, dense_below=tokens + 1)
    # the scores alone would take 4 GiB
    assert torch.cuda.max_memory_allocated(cuda) - before < 2**29
    seen = torch.ones(64, tokens, dtype=torch.bool, device=cuda).tril(tokens - 64)
    exact, _ = masked_attention(query[:, :, -64:], key, value, seen)
    torch.testing.assert_close(out[:, :, -64:].double(), exact, atol=1e-4, rtol=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("mask", [{"is_causal": True}, {"attn_mask": torch.ones(1, 1, 8192, 8192, dtype=torch.bool).tril()}])
def test_wide_heads_in_groups_write_out_no_scores(mask):
    """As in Gemma 4's full-attention layers."""
    query, key, value = (torch.randn(1, heads, 8192, 512, device="cuda", dtype=torch.bfloat16) for heads in (8, 2, 2))
    mask = {name: x.cuda() if isinstance(x, torch.Tensor) else x for name, x in mask.items()}
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out = sdpa(query, key, value, 512**-0.5, **mask)
    # the keys and values once more per query head, and the mask in bfloat16; the scores would be 1 GiB and more
    assert torch.cuda.max_memory_allocated() - before < 2**29
    assert out.isfinite().all()


LENGTH = 240
MASK_OPTIONS = {"tau": 0.0, "block_size": 16, "min_budget": 0}
OPTIONS = {**MASK_OPTIONS, "dense_below": 100, "return_stats": True}
# the second KV head's heads keep everything
GAMMAS = (0.3, 1.0, 1.0, 1.0)


def inputs() -> tuple[Tensor, Tensor, Tensor]:
    case = call(LENGTH, seed=18, sharpness=5.0)
    return case.query, case.key, case.value


def dense(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return dense_attention(attention_inputs(query, key, value))[0]


@pytest.fixture
def _no_break_even(monkeypatch):
    monkeypatch.setitem(CPU_BREAK_EVEN, torch.float32, 2.0)


def dense_heads(without_kernel, method="flexprefill", tensors=None, **options):
    """Say "all" if the call as a whole ran dense, else the KV heads that did; the sparse kernel runs for the others."""
    options = {**OPTIONS, **options}
    if method != "flexprefill":
        del options["tau"]
    called, tensors = len(without_kernel), tensors or inputs()
    with torch.no_grad():
        out, stats = sparse_attention(*tensors, method, **options)
    assert (len(without_kernel) == called) == stats.dense
    assert not stats.dense or (stats.dense_heads.all() and torch.equal(out, dense(*tensors)))
    by_kv_head = stats.dense_heads[0].unflatten(0, (2, 2))
    assert torch.equal(by_kv_head[:, 0], by_kv_head[:, 1])
    return "all" if stats.dense else by_kv_head[:, 0].tolist()


@pytest.mark.usefixtures("_no_break_even")
@pytest.mark.parametrize(
    ("gamma", "options", "expected"),
    [
        (GAMMAS, {}, [False, True]),
        ((1, 1, 0.3, 1), {}, [True, False]),
        ((0.3, 1, 1, 0.3), {}, [False, False]),
        ((1.0,) * 4, {}, "all"),
        (1.0, {}, "all"),
        (1.0, {"method": "hybrid"}, "all"),
        (GAMMAS, {"method": "hybrid"}, [False, True]),
        (0.3, {}, [False, False]),
        ((1.0,) * 4, {"max_budget": 32}, [False, False]),
        # what the call says comes first
        (GAMMAS, {"dense_below": 241}, "all"),
        (GAMMAS, {"dense_below": 240}, [False, True]),
        (GAMMAS, {"dense_below": 0}, [False, False]),
        (1.0, {"dense_below": 0}, [False, False]),
    ],
    ids=str,
)
def test_heads_that_keep_everything_run_dense_by_kv_head(without_kernel, gamma, options, expected):
    assert dense_heads(without_kernel, gamma=gamma, **options) == expected


def test_lists_are_not_read_of_a_users_mask(without_kernel):
    options = {name: OPTIONS[name] for name in ("block_size", "dense_below", "return_stats")}
    _, stats = sparse_attention(*inputs(), lambda *tensors, **given: causal_mask(*tensors, **given), **options)
    assert not stats.dense_heads.any()


@pytest.mark.parametrize(
    "options",
    [
        {"softcap": 20.0}, {"window": 100}, {"attention_mask": torch.ones(1, LENGTH, dtype=torch.bool)}, {"q_offset": 0},
        {"sinks": torch.zeros(4)},
    ],
    ids=lambda options: next(iter(options)),
)  # fmt: skip
def test_only_whole_plain_prompts_have_dense_heads(without_kernel, options):
    query, key, value = inputs()
    assert dense_heads(without_kernel, tensors=(query[:, :, 100:], key, value), gamma=GAMMAS) == [False, False]
    for gamma in (GAMMAS, 1.0):
        assert dense_heads(without_kernel, gamma=gamma, **options) == [False, False]


@pytest.mark.attention
@pytest.mark.usefixtures("_no_break_even")
@pytest.mark.parametrize("at_once", [2**30, 1], ids=["all heads", "head by head"])
def test_heads_at_gamma_one_run_dense_and_others_under_their_mask(at_once):
    query, key, value = inputs()
    out, stats = flexprefill_attention(query, key, value, gamma=GAMMAS, **OPTIONS, max_mask_bytes=at_once)
    mask, found = flexprefill_mask(query, key, GAMMAS, **MASK_OPTIONS, return_stats=True)
    whole = dense(query, key, value)
    if at_once == 1:  # torch 2.8 rounds a head by itself otherwise
        each = [dense(query[:, head : head + 1], *(x[:, head // 2 : head // 2 + 1] for x in (key, value))) for head in range(4)]
        whole = torch.cat(each, 1)
    assert stats.dense_heads.tolist() == [[False, False, True, True]]
    assert torch.equal(out[:, 2:], whole[:, 2:])
    torch.testing.assert_close(out, dense_under(mask, query, key, value), atol=2e-5, rtol=0)
    assert (out[:, 0] - whole[:, 0]).abs().max() > 0.01
    for name in ("density", "coverage", "num_slash_blocks", "js_distance"):
        torch.testing.assert_close(getattr(stats, name), getattr(found, name))


@pytest.mark.attention
def test_heads_above_the_break_even_of_a_cpu_run_dense(monkeypatch):
    query, key, value = inputs()
    gammas = (0.2, 0.3, 0.95, 0.99)
    mask, found = flexprefill_mask(query, key, gammas, **MASK_OPTIONS, return_stats=True)
    shares = found.density.unflatten(1, (2, 2)).mean(2)[0].tolist()
    assert shares[0] + 0.1 < shares[1] < 0.97
    monkeypatch.setitem(CPU_BREAK_EVEN, torch.float32, shares[1] - 0.05)
    out, stats = flexprefill_attention(query, key, value, gamma=gammas, **OPTIONS)
    under, whole = dense_under(mask, query, key, value), dense(query, key, value)
    assert stats.dense_heads.tolist() == [[False, False, True, True]]
    assert torch.equal(out[:, 2:], whole[:, 2:])
    torch.testing.assert_close(out[:, :2], under[:, :2], atol=2e-5, rtol=0)
    assert (out - under)[:, 2:].abs().max() > 1e-4 and torch.equal(stats.density, found.density)
    monkeypatch.setitem(CPU_BREAK_EVEN, torch.float32, shares[1] + 0.01)
    assert not flexprefill_attention(query, key, value, gamma=gammas, **OPTIONS)[1].dense_heads.any()


@pytest.mark.parametrize(
    ("sizes", "needs_grad", "said"),
    [
        ((16, 512), False, None), ((513, 64), False, "head_dim 513 outside 16 to 512"),
        ((64, 15), False, "v_head_dim 15 outside 16 to 512"), ((512, 512), False, None),
        ((512, 128), True, "head_dim 512 over 256, with gradients"),
        ((128, 257), True, "v_head_dim 257 over 256, with gradients"), ((256, 256), True, None),
    ],
)  # fmt: skip
def test_head_sizes_that_run_dense_are_named(sizes, needs_grad, said):
    assert head_dim_reason(*sizes, needs_grad=needs_grad) == said


@pytest.mark.gpu
def test_heads_at_gamma_one_run_dense_on_a_gpu(cuda):
    query, key, value = (x.to(cuda) for x in inputs())
    options = {**OPTIONS, "block_size": 64}
    with torch.no_grad():
        out, stats = flexprefill_attention(query, key, value, gamma=GAMMAS, **options)
    assert stats.dense_heads.tolist() == [[False, False, True, True]]
    mask = flexprefill_mask(query, key, GAMMAS, tau=0.0, block_size=64, min_budget=0)
    torch.testing.assert_close(out, dense_under(mask, query, key, value), atol=2e-5, rtol=0)


@pytest.mark.gpu
def test_gradients_go_through_the_sparse_kernel(cuda):
    query, key, value = (x.to(cuda).requires_grad_() for x in inputs())
    grads = []
    for dense_below in (100, 0):
        options = {**OPTIONS, "block_size": 64, "dense_below": dense_below}
        with torch.enable_grad():
            out, stats = flexprefill_attention(query, key, value, gamma=GAMMAS, **options)
            assert not stats.dense_heads.any()
            grads.append(torch.autograd.grad(out.square().sum(), (query, key, value)))
    torch.testing.assert_close(*grads, atol=1e-4, rtol=1e-4)
