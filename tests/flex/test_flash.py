"""FLASH called directly, with a stand-in for flash-attn-4."""

from functools import partial
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention.flex_attention import create_block_mask

from flexmask import mask_function, plan, plans, sparse_attention, warmup
from flexmask import method as method_module
from flexmask.base.inputs import AttentionInputs
from flexmask.base.selection import Choice, block_lists
from flexmask.flex import flash_check
from flexmask.flex.backend import Backend
from flexmask.flex.flash import flash_attention
from flexmask.flex.flash_case import FlashKind
from flexmask.flex.flash_check import Verdict, check_flash
from tests.attention_calls import SINKS, call
from tests.comparisons import assert_same_attention
from tests.flex.stand_in import forward

CPU = torch.device("cpu")


# blocks of 16, so that attention in float64 is fast
PLAIN = FlashKind(torch.bfloat16, 32, 32, block_size=16, is_direct=True)
KINDS: dict[str, dict[str, Any]] = {
    "plain": {}, "window": {"has_window_or_offset": True}, "one list": {"shares_lists": True, "queries_per_kv": 7},
    "unequal": {"head_dim": 48},
}  # fmt: skip


@pytest.mark.parametrize("changes", KINDS.values(), ids=KINDS)
def test_the_check_finds_a_direct_call_right_or_wrong(package, changes):
    kind = PLAIN._replace(**changes)
    found = check_flash(kind, CPU)
    assert (found.reason, found.lse_reason, found.lse_factor) == ("", "", 1.0)
    assert package.call_args.kwargs["window_size_left"] == (93 if "has_window_or_offset" in changes else None)
    of_windows = ("window",) if "has_window_or_offset" in changes else ()
    for fault in ("offset", "lists", "mask_block_cnt", "full_block_cnt", "no log-sum-exp", *of_windows):
        package.side_effect = partial(forward, fault=fault)
        assert "outputs off by" in check_flash(kind, CPU).reason, fault
    package.side_effect = partial(forward, fault="log-sum-exp")
    assert "log-sum-exp off by" in check_flash(kind, CPU).lse_reason
    package.side_effect = ValueError("tile_n=96")
    assert check_flash(kind, CPU).reason == "its check here raised ValueError: tile_n=96"


CALLS: dict[str, tuple[dict[str, Any], Any]] = {
    "whole": ({"q_len": 129}, None),
    "chunk": ({"q_len": 150, "kv_len": 333}, None),
    "window, sinks": ({"q_len": 150, "kv_len": 333, "scores": {"window": 70}}, SINKS),
    "a window beyond int32": ({"q_len": 100, "kv_len": 133, "scores": {"window": 2**40, "scale": 0.3}}, None),
    "one list": ({"q_len": 300, "method": "streaming_llm", "sink_blocks": 1, "window_blocks": 2}, None),
    "two prompts, wider values": ({"batch": 2, "head_dims": (32, 80)}, SINKS),
}  # fmt: skip


@pytest.mark.parametrize(("given", "sinks"), CALLS.values(), ids=CALLS)
@pytest.mark.parametrize("groups", [False, True])
def test_output_and_log_sum_exp_are_those_of_kept_scores(directly, given, sinks, groups):
    case = call(**given)
    memory = {"max_mask_bytes": 1} if groups else {}
    out, lse = case.attend(sinks=sinks, return_lse=True, **memory)
    keep = case.select().keep
    assert not keep.all()
    assert_same_attention(out, case.under(keep, sinks)[0])
    torch.testing.assert_close(lse.double(), case.under(keep)[1], atol=1e-4, rtol=0)
    torch.testing.assert_close(case.attend(sinks=sinks, **memory), out, atol=0, rtol=0)
    assert directly.called


def test_a_log_sum_exp_is_asked_for_where_it_is_needed_and_corrected(package):
    case = call(64)
    selection, inputs = case.select(), AttentionInputs(case.query, case.key, case.value, 0.2)
    assert flash_attention(inputs, selection.lists, 16)[1] is None
    assert package.call_args.kwargs["return_lse"] is False
    lses = [flash_attention(inputs, selection.lists, 16, True, factor)[1] for factor in (1.0, 2.0)]
    assert torch.equal(lses[0] * 2, lses[1])
    assert flash_attention(inputs.with_fields(sinks=SINKS), selection.lists, 16)[1] is None
    assert package.call_args.kwargs["return_lse"] is True


def test_only_what_the_kernel_cannot_read_is_copied(package):
    case = call(64, dtype=torch.bfloat16)
    lists, given = case.select().lists, (case.query, case.key, case.value)

    def read(*tensors):
        out = flash_attention(AttentionInputs(*tensors, 0.2), lists, 16)[0]
        assert torch.equal(out, expected)
        return [x.data_ptr() == y.data_ptr() for x, y in zip(package.call_args.args, tensors, strict=True)]

    expected = flash_attention(AttentionInputs(*given, 0.2), lists, 16)[0]
    assert read(*given) == read(*(x.transpose(1, 2).contiguous().transpose(1, 2) for x in given)) == [True] * 3
    shifted = [torch.cat([x[..., :1], x, x[..., :7]], -1)[..., 1:33] for x in given]
    odd_rows = [torch.nn.functional.pad(x, (0, 3))[..., :32] for x in given]
    by_dimension = [x.mT.contiguous().mT for x in given]
    for tensors in (shifted, odd_rows, by_dimension):
        assert read(*tensors) == [False] * 3
    keys = case.key[:, :1].expand(-1, 2, -1, -1)
    expected = flash_attention(AttentionInputs(case.query, keys.contiguous(), case.value, 0.2), lists, 16)[0]
    assert read(case.query, keys, case.value) == [True, False, True]


OPTIONS = {"block_size": 16, "gamma": 0.7, "min_budget": 16, "min_coverage": 0.0, "dense_below": 0}


@pytest.fixture
def asked(package, monkeypatch):
    """Calls say what their masks hide; they are direct where the mask allows it."""
    found = []

    def choose(*given, has_mask_mod, **named):
        found.append(has_mask_mod)
        return Backend("flash", is_direct=True) if not has_mask_mod else Backend("cpu")

    monkeypatch.setattr(plans, "chosen_backend", choose)
    return found


def only_itself(b, h, q_idx, kv_idx):
    return q_idx == kv_idx


def users_mask(query, key, *, block_size, **where):
    length = query.shape[2]
    return create_block_mask(only_itself, None, None, length, length, device="cpu", BLOCK_SIZE=block_size)


def chosen_mask(problem):
    keep = problem.visible.expand(1, 2, -1, -1)
    return Choice(block_lists(keep, torch.zeros_like(problem.visibility.full)), None, {}, only_itself)


# a user's mask is one list for all heads, for which the backend is chosen again
@pytest.mark.attention
@pytest.mark.parametrize(
    ("method", "expected"), [(users_mask, [True, True]), (chosen_mask, [False, True])], ids=["user", "method"]
)
def test_the_mask_mod_of_a_users_mask_or_method_is_not_dropped(asked, package, monkeypatch, method, expected):
    """Each row sees itself alone."""
    monkeypatch.setattr(method_module, "METHODS", dict(method_module.METHODS))
    monkeypatch.setattr(mask_function, "METHODS", method_module.METHODS)
    query, key, value = torch.randn(3, 1, 2, 40, 16)
    sparse_attention(query, key, value, **OPTIONS)
    assert asked == [False] and package.call_count == 1
    asked.clear()
    if method is chosen_mask:
        method = mask_function.method(method)
    out = sparse_attention(query, key, value, method=method, block_size=16, dense_below=0)
    torch.testing.assert_close(out, value)
    assert asked == expected and package.call_count == 1


@pytest.mark.attention
def test_a_plan_of_direct_calls_runs_inside_of_a_compiled_forward(directly, monkeypatch):
    tensors = [torch.randn(1, heads, 100, 16) for heads in (4, 2, 2)]
    made = plan(*tensors, **OPTIONS)
    expected = made.run(*tensors)
    assert directly.call_count == 1
    monkeypatch.setattr(plans, "chosen_backend", lambda *given, **named: Backend("cpu"))
    compiled = torch.compile(lambda *given: made.run(*given), fullgraph=True)
    torch.testing.assert_close(compiled(*tensors), expected, atol=1e-5, rtol=1e-5)
    assert directly.call_count == 1


def test_fake_tensors_have_shapes(directly):
    with FakeTensorMode():
        tensors = [torch.empty(1, heads, 100, 16) for heads in (4, 2, 2)]
        out, lse = sparse_attention(*tensors, return_lse=True, **OPTIONS)
    assert (out.shape, lse.shape, directly.call_count) == ((1, 4, 100, 16), (1, 4, 100), 0)


@pytest.mark.usefixtures("without_kernel")
@pytest.mark.parametrize("chunked", [False, True])
def test_a_warm_up_also_checks_the_kinds_of_compiled_callers(monkeypatch, chunked):
    found, asked = {}, []
    monkeypatch.setattr(flash_check, "_VERDICTS", found)
    others = (PLAIN._replace(dtype=torch.float16), PLAIN._replace(head_dim=64), PLAIN._replace(v_head_dim=64))
    for kind in (PLAIN, PLAIN._replace(has_window_or_offset=True), *others, PLAIN._replace(is_direct=False)):
        found["cpu", 0, kind] = Verdict()
    monkeypatch.setattr(flash_check, "flash_verdict", lambda kind, device: asked.append((kind, device)))
    given = {"dtype": torch.bfloat16, "device": "cpu", "block_size": 64, "chunked": chunked}
    warmup(4, 2, 32, **given)
    through = [PLAIN._replace(is_direct=False, has_window_or_offset=captures) for captures in (chunked, True)]
    assert asked == [(kind, torch.device("cpu", 0)) for kind in through]
    asked.clear()
    with pytest.raises(ValueError, match="triton"):
        warmup(4, 2, 32, **given, backend="triton")
    assert asked == []
