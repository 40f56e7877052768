"""sparse_attention: every method of the gallery through one call, equal to dense attention under the method's own mask."""

from __future__ import annotations

import functools

import pytest
import torch

from flexmask import flexprefill_attention, sparse_attention
from flexmask.block_masks import MASKS, causal_mask
from tests.block_masks.gallery import SPARSE
from tests.comparisons import assert_same_attention
from tests.compile_support import dense_under
from tests.compile_support import fresh_compiler as fresh_compiler

QUERY, KEY, VALUE = (torch.randn(2, heads, 100, 32, generator=torch.Generator().manual_seed(heads)) for heads in (4, 2, 2))
TOKENS = torch.arange(100)[None] >= torch.tensor([[0], [23]])
SHARED = {"block_size": 16, "attention_mask": TOKENS, "window": 90}


def causal_by_another_name(*inputs, **options):
    return causal_mask(*inputs, **options)


@pytest.mark.attention
def test_methods_attend_to_their_own_blocks():
    # one test, so that the kernel is compiled once; heads that agree, heads that do not, a function with options, any function
    for name in ("streaming_llm", "oracle", functools.partial(MASKS["xattention"], stride=2), causal_by_another_name):
        known = isinstance(name, str)
        options = SPARSE[name] if known else {}
        generate = MASKS[name] if known else name
        out = sparse_attention(QUERY, KEY, VALUE, name, dense_below=0, **SHARED, **options)
        mask = generate(QUERY, KEY, **SHARED, **options)
        assert_same_attention(out, dense_under(mask, QUERY.double(), KEY.double(), VALUE.double()))
        # a dense fallback without a word would not pass
        dense = sparse_attention(QUERY, KEY, VALUE, name, **SHARED, **options)
        assert not known or (out - dense).abs().max() > 1e-3


def test_head_groups_and_plans_by_head_see_the_heads_that_they_have_to(monkeypatch):
    seen = []

    def attend(inputs, make_mask, block_size, at_once, backend, return_lse):
        seen.append((at_once, make_mask(inputs.placed())[0].shape[:2]))
        return inputs.query, None, None

    monkeypatch.setattr("flexmask.gallery.attention_by_groups", attend)
    for name, options in {"xattention": {}, "infllm": {}, "minference": {"plan": ((30, 50), (64, 50)) * 2}}.items():
        sparse_attention(QUERY, KEY, VALUE, name, dense_below=0, block_size=16, max_mask_bytes=1, **options)
    # infllm decides for all heads together, a plan tells them apart
    assert seen == [(0, (2, 4)), (4, (2, 1)), (4, (2, 4))]


def test_flexprefill_is_flexprefill_attention():
    options = {"gamma": 0.6, "min_budget": 0, "return_stats": True}
    out, stats = sparse_attention(QUERY, KEY, VALUE, block_size=16, **options)
    expected, _ = flexprefill_attention(QUERY, KEY, VALUE, block_size=16, **options)
    assert torch.equal(out, expected)
    assert stats.dense


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"method": "flash"}, "method must be one of 'causal'.*; got 'flash'"),
        ({"method": "xattention", "gamma": 0.9}, "xattention takes the options stride, threshold; got 'gamma'"),
        ({"method": "causal", "gamma": 0.9}, "causal takes the options of every mask only; got 'gamma'"),
        ({"method": "minference", "plan": ((1, 2),) * 3}, r"one pair per query head \(4\); got 3 pairs"),
        ({"method": "causal", "block_size": 40}, "block_size must be a multiple of 16 from 16 to 256; got 40"),
        ({"method": "causal", "backend": "cudnn"}, "backend must be one of"),
        ({"method": "causal", "dense_below": -1}, "dense_below must be >= 0"),
    ],
)
def test_wrong_arguments_are_refused_at_every_length(arguments, message):
    with pytest.raises((TypeError, ValueError), match=message):
        sparse_attention(QUERY, KEY, VALUE, **arguments)


@pytest.mark.attention
def test_function_that_gives_other_blocks_is_refused():
    def method(query, key, *, block_size, **where):
        return causal_mask(query, key, block_size=2 * block_size, **where)

    with pytest.raises(ValueError, match=r"in blocks of 32 tokens, as it is told to; got \(64, 64\)"):
        sparse_attention(QUERY, KEY, VALUE, method, block_size=32, dense_below=0)
