"""sparse_attention: every method, equal to dense attention under its own mask."""

import functools

import pytest
import torch

from flexmask import METHODS, sparse_attention
from flexmask.attention import RECOMMENDED
from flexmask.block_masks import causal_mask
from tests.block_masks.gallery import MASKS, SPARSE
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
    # one test: the kernel is compiled once
    for name in ("streaming_llm", "oracle", functools.partial(MASKS["xattention"], stride=2), causal_by_another_name):
        known = isinstance(name, str)
        options = SPARSE[name] if known else {}
        generate = MASKS[name] if known else name
        out = sparse_attention(QUERY, KEY, VALUE, name, dense_below=0, **SHARED, **options)
        mask = generate(QUERY, KEY, **SHARED, **options)
        assert_same_attention(out, dense_under(mask, QUERY.double(), KEY.double(), VALUE.double()))
        dense = sparse_attention(QUERY, KEY, VALUE, name, **SHARED, **options)
        assert not known or (out - dense).abs().max() > 1e-3


def test_the_recommended_method_is_the_default(without_kernel):
    options = {"block_size": 16, "dense_below": 0, "return_stats": True}
    _, default = sparse_attention(QUERY, KEY, VALUE, **options)
    _, named = sparse_attention(QUERY, KEY, VALUE, RECOMMENDED, **options)
    assert RECOMMENDED == "hybrid" in METHODS
    assert torch.equal(default.density, named.density)
    assert not default.row_coverage.isnan().any()
