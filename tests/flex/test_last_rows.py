"""Rows that keep every visible block, attended to in parts of the keys: with the stand-in for flash-attn-4, on a CPU."""

from dataclasses import dataclass

import pytest
import torch

pytest.importorskip("triton")
from flexmask import mask_function, plan, plans, sparse_attention
from flexmask import method as method_module
from flexmask.base.inputs import AttentionInputs
from flexmask.base.selection import listed_blocks
from flexmask.block_masks.hybrid import Hybrid
from flexmask.flex import backend as backend_module
from flexmask.flex import last_rows
from flexmask.flex.backend import Backend, chosen_backend
from flexmask.flex.flash import flash_attention
from flexmask.flex.flash_check import Verdict
from flexmask.flex.last_rows import last_rows_in_parts
from tests.attention_calls import SINKS, call
from tests.comparisons import assert_same_attention

SIZE = 16
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="where there is a GPU, kernels run there")


@pytest.fixture
def processors(monkeypatch):
    """Set the number of multiprocessors."""
    return lambda number: monkeypatch.setattr(last_rows, "num_sms", lambda device: number)


def inputs(q_len, kv_len, heads=2, batch=1):
    query, key = torch.empty(batch, heads, q_len, 8), torch.empty(batch, 1, kv_len, 8)
    return AttentionInputs(query, key, key, 1.0)


LENGTHS = [(320, 320), (321, 321), (335, 335), (336, 1600), (177, 1601), (33, 999), (48, 4000), (100, 1007), (17, 3000)]


@pytest.mark.parametrize("number", [4, 9, 24, 132])
@pytest.mark.parametrize(("q_len", "kv_len"), LENGTHS)
def test_each_row_sees_each_visible_key_in_one_part(processors, q_len, kv_len, number):
    """As the kernel reads the lists: full blocks without a mask, others under causality in the sequence of copies."""
    processors(number)
    last = last_rows_in_parts(inputs(q_len, kv_len), SIZE)
    dense_blocks = [block for block in range(-(-q_len // SIZE)) if (block + 1) * SIZE > q_len - SIZE]
    if last is None:
        few = min(number // (2 * len(dense_blocks)), -(-kv_len // SIZE) // (8 * len(dense_blocks))) < 2
        assert few or q_len <= len(dense_blocks) * SIZE
        return
    assert last.is_sparse.tolist() == [int(block not in dense_blocks) for block in range(-(-q_len // SIZE))]
    assert last.rows == q_len - dense_blocks[0] * SIZE <= last.copied == len(dense_blocks) * SIZE
    partial, full = (listed_blocks(*last.lists[at : at + 2], -(-kv_len // SIZE)) for at in (0, 2))
    assert not (partial & full).any()
    assert all(x.dtype == torch.int32 and x.is_contiguous() and x.shape[:2] == (1, 2) for x in last.lists)
    rows, keys = last.parts * last.copied, torch.arange(kv_len)
    position = torch.arange(rows) + kv_len - rows
    causal = keys <= position[:, None]
    listed = [x.repeat_interleave(SIZE, 2).repeat_interleave(SIZE, 3)[..., :kv_len] for x in (partial, full)]
    # a kernel may or may not mask full blocks
    assert not (listed[1] & ~causal).any()
    seen = ((listed[0] & causal) | listed[1]).unflatten(2, (last.parts, last.copied))
    expected = keys <= torch.arange(kv_len - last.copied, kv_len)[:, None]
    assert torch.equal(seen.sum(2), expected.expand(1, 2, -1, -1).long())
    # no part is much longer than another
    sizes = (last.lists.kv_num_blocks + last.lists.full_kv_num_blocks)[0, 0]
    assert sizes.max() <= sizes.min() + 1


@pytest.mark.parametrize(("heads", "batch", "number"), [(132, 1, 132), (67, 1, 132), (34, 2, 132), (2, 1, 0)])
def test_many_heads_fill_the_device_without_parts(processors, heads, batch, number):
    processors(number)
    assert last_rows_in_parts(inputs(320, 320, heads, batch), SIZE) is None


CALLS = {
    "whole": {"q_len": 320},
    "whole, a last block of few rows": {"q_len": 579},
    "chunk": {"q_len": 150, "kv_len": 777},
    "two prompts, wider values": {"batch": 2, "q_len": 320, "head_dims": (32, 80)},
}


@pytest.mark.parametrize("given", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize("sinks", [None, SINKS], ids=["", "sinks"])
@pytest.mark.parametrize("memory", [{}, {"max_mask_bytes": 1}], ids=["", "groups"])
def test_output_and_log_sum_exp_are_those_of_kept_scores(directly, processors, given, sinks, memory):
    case = call(**given, method="hybrid", gamma=0.9, min_coverage=0.0)
    keep = case.select().keep
    assert keep[:, :, -1].all() and not keep.all()
    results = {}
    for number in (0, 48):
        processors(number)
        directly.reset_mock()
        results[number] = case.attend(sinks=sinks, return_lse=True, **memory)
        groups = case.query.shape[0] * case.query.shape[1] if memory else 1
        assert directly.call_count == groups * (1 if number == 0 else 2)
    out, lse = results[48]
    assert_same_attention(out, case.under(keep, sinks)[0])
    torch.testing.assert_close(lse.double(), case.under(keep)[1], atol=1e-4, rtol=0)
    torch.testing.assert_close(results[48], results[0], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(case.attend(sinks=sinks, **memory), out, atol=0, rtol=0)


def test_a_corrected_log_sum_exp_weighs_the_parts(package, processors):
    processors(48)
    case = call(320, method="hybrid", gamma=0.9, min_coverage=0.0)
    given = AttentionInputs(case.query, case.key, case.value, 32**-0.5)
    last = last_rows_in_parts(given, SIZE)
    right = package.side_effect

    def halved(*tensors, **named):
        out, lse, *rest = right(*tensors, **named)
        return out, lse if lse is None else lse / 2, *rest

    expected = flash_attention(given, case.select().lists, SIZE, True, 1.0, last)
    package.side_effect = halved
    torch.testing.assert_close(flash_attention(given, case.select().lists, SIZE, True, 2.0, last), expected)
    with pytest.raises(AssertionError, match="not close"):
        torch.testing.assert_close(flash_attention(given, case.select().lists, SIZE, False, 1.0, last)[0], expected[0])


@pytest.mark.parametrize(("given", "is_written"), [({}, True), ({"max_mask_bytes": 1}, False)], ids=["", "groups"])
def test_the_output_is_written_to_the_callers_memory_if_the_kernel_can(directly, processors, given, is_written):
    """Of one group of heads, if the kernel can write there."""
    processors(48)
    case = call(150, 777, method="hybrid", gamma=0.9, min_coverage=0.0)
    tensors, expected = (case.query, case.key, case.value), case.attend()
    of_calls = plan(*tensors, dense_below=0, gamma=0.9, block_size=SIZE, min_budget=0, min_coverage=0.0, **given)
    # rows of heads, as in a batch; the second starts between 16 bytes
    for skipped, can in ((4, is_written), (1, False)):
        memory = torch.full((4 * 150 * 32 + 8,), torch.nan)
        wanted = memory[skipped : skipped - 8].view(150, 4, 32).transpose(0, 1)[None]
        assert wanted.data_ptr() % 16 == (0 if skipped == 4 else 4)
        out = of_calls.attend(of_calls.checked_inputs(*tensors).with_fields(out=wanted)).out
        torch.testing.assert_close(out, expected, atol=1e-6, rtol=1e-6)
        assert (out.data_ptr() == wanted.data_ptr()) == can
        assert memory[:skipped].isnan().all() and memory[skipped - 8 :].isnan().all()


OTHERS = {
    "a window": {"scores": {"window": 90}},
    "last rows that are sparse": {"last_rows_dense": False},
    "another method": {"method": "flexprefill"},
}


@pytest.mark.parametrize("given", OTHERS.values(), ids=OTHERS)
def test_other_rows_are_not_cut(directly, processors, given):
    processors(48)
    case = call(**{"q_len": 320, "method": "hybrid", "gamma": 0.9, **given})
    case.attend()
    assert directly.call_count == 1


def test_parts_are_not_weighed_by_a_wrong_log_sum_exp(package, processors, monkeypatch):
    processors(48)
    case = call(320, method="hybrid", gamma=0.9, min_coverage=0.0)
    for has_lse, calls in ((True, 2), (False, 1)):
        backend = Backend("flash", is_direct=True, has_lse=has_lse)
        monkeypatch.setattr(plans, "chosen_backend", lambda *given, backend=backend, **named: backend)
        package.reset_mock()
        assert_same_attention(case.attend(), case.under(case.select().keep)[0])
        assert package.call_count == calls


def test_a_verdict_on_the_log_sum_exp_reaches_the_plan(monkeypatch):
    monkeypatch.setattr(backend_module, "flash_available", lambda: True)
    monkeypatch.setattr(backend_module, "_check_flash_by_name", lambda *given: None)
    given = inputs(320, 320)
    for verdict in (Verdict(), Verdict(lse_reason="off by 1.3")):
        found = chosen_backend("flash", given, SIZE, verdict=lambda *kind, verdict=verdict: verdict, has_mask_mod=False)
        assert found.has_lse == (not verdict.lse_reason)


def test_a_method_derived_from_hybrid_chooses_its_own_last_rows(directly, processors, monkeypatch):
    processors(48)
    monkeypatch.setattr(method_module, "METHODS", dict(method_module.METHODS))
    monkeypatch.setattr(mask_function, "METHODS", method_module.METHODS)

    @dataclass(frozen=True, eq=False)
    class Nearest(Hybrid):
        def select(self, problem):
            return problem.nearest_diagonals(2)

    nearest_mask = mask_function.mask_function("nearest", Nearest)
    case = call(320, method="hybrid")
    out = sparse_attention(case.query, case.key, case.value, method=nearest_mask, block_size=SIZE, dense_below=0)
    keep = torch.ones(20, 20, dtype=torch.bool).tril().triu(-1).expand(1, 4, -1, -1)
    assert_same_attention(out, case.under(keep)[0])
    assert directly.call_count == 1


def test_groups_of_one_size_share_the_lists(directly, processors):
    processors(48)
    case = call(320, method="hybrid", gamma=0.9, min_coverage=0.0)
    where = {"dense_below": 0, "gamma": 0.9, "block_size": SIZE, "min_budget": 0, "min_coverage": 0.0, "max_mask_bytes": 1}
    groups = plan(case.query, case.key, case.value, **where).group_plans
    assert (
        len(groups) == 4 and groups[0].last_rows is not None and all(group.last_rows is groups[0].last_rows for group in groups)
    )


def test_layers_of_a_plan_share_the_lists(directly, processors, monkeypatch):
    processors(48)
    case = call(320, method="hybrid", gamma=0.9, min_coverage=0.0)
    tensors = case.query, case.key, case.value
    of_calls = plan(*tensors, dense_below=0, gamma=0.9, block_size=SIZE, min_budget=0, min_coverage=0.0)
    monkeypatch.setattr(plans, "last_rows_in_parts", None)
    out = of_calls.run(*tensors)
    assert directly.call_count == 2
    assert_same_attention(out, case.under(case.select().keep)[0])
