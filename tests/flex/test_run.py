"""The log-sum-exp of a kernel that returns a multiple of it: what becomes of its factor, on a kernel of this file."""

import math

import pytest
import torch

from flexmask import flexprefill_mask, sparse_attention
from flexmask.base.inputs import attention_inputs
from flexmask.flex import heads, packed
from flexmask.flex.backend import ChosenBackend
from flexmask.flex.packed import attention_in_one_call
from flexmask.flex.run import run_flex_attention
from flexmask.flex.sinks import with_sinks
from flexmask.varlen import segments_of
from tests.attention_calls import SINKS, call
from tests.packs import pack

FACTOR = 1 / math.log(2)


@pytest.fixture
def kernel(monkeypatch):
    """A kernel whose output is known and whose log-sum-exp is too small by the factor."""
    out, lse = torch.randn(1, 4, 300, 32), torch.randn(1, 4, 300)
    lse[:, :, :3] = -math.inf
    asked = []

    def compiled(function, *variant, **options):
        def run(query, key, value, block_mask, scale, limit, options, needs_lse, sinks):
            asked.append(needs_lse)
            return out.clone(), lse / FACTOR if needs_lse else None

        return run

    monkeypatch.setattr("flexmask.flex.run.compiled", compiled)
    return out, lse, asked


@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize("return_lse", [False, True])
def test_the_factor_comes_in_before_sinks_and_the_result(kernel, return_lse, has_sinks):
    out, lse, asked = kernel
    it, sinks = call(), SINKS if has_sinks else None
    inputs = attention_inputs(it.case.query, it.case.key, it.value, sinks=sinks)
    mask = flexprefill_mask(it.case.query, it.case.key, block_size=16)
    got, got_lse = run_flex_attention(inputs, mask, "flash", return_lse, FACTOR)
    expected = with_sinks(out.clone(), lse, SINKS) if has_sinks else out
    assert asked == [return_lse or has_sinks]
    torch.testing.assert_close(got, expected)
    assert (got_lse is not None) == return_lse
    if return_lse:
        torch.testing.assert_close(got_lse, lse)
    if has_sinks:
        with pytest.raises(AssertionError, match="not close"):
            torch.testing.assert_close(run_flex_attention(inputs, mask, "flash", return_lse)[0], expected)


@pytest.fixture
def chosen(monkeypatch):
    """Stands for a GPU: FLASH with the factor, and what was asked and run."""
    asked, ran = [], []

    def choose(backend, inputs, block_size, return_lse=False, is_dense=False, shared=False):
        asked.append((backend, block_size, return_lse, shared))
        return ChosenBackend("flash", FACTOR)

    def run(inputs, mask, *rest):
        ran.append(rest)
        shape = inputs.query.shape[:3]
        return inputs.value.new_zeros(*shape, inputs.value.shape[3]), torch.zeros(shape) if rest[1] else None

    monkeypatch.setattr("flexmask.attend.chosen_backend", choose)
    for module in (heads, packed):
        monkeypatch.setattr(module, "run_flex_attention", run)
    return asked, ran


@pytest.mark.parametrize("max_mask_bytes", [2**30, 1])
def test_the_factor_goes_with_every_group_of_heads(chosen, max_mask_bytes):
    asked, ran = chosen
    call().attend(return_lse=True, max_mask_bytes=max_mask_bytes)
    assert asked == [("auto", 16, True, False)]
    assert ran == [("flash", True, FACTOR)] * (1 if max_mask_bytes > 1 else 4)


def test_one_list_for_all_heads_is_another_kind_of_call(chosen):
    asked, ran = chosen
    it = call()
    with torch.no_grad():
        sparse_attention(it.case.query, it.case.key, it.value, "causal", block_size=16, dense_below=0, window=100)
    assert [shared for *_, shared in asked] == [False, True]
    assert ran == [("flash", False, FACTOR)]


def test_the_factor_goes_with_packed_sequences(chosen):
    inputs, q_bounds, k_bounds = pack()
    segments = [each for each in segments_of(q_bounds, k_bounds, q_bounds[-1], k_bounds[-1]) if each.q_len]
    given = attention_inputs(*(x.transpose(0, 1)[None] for x in inputs))
    attention_in_one_call(given, segments, "flash", True, FACTOR)
    assert chosen[1] == [("flash", True, FACTOR)]
