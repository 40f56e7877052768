"""flexprefill_mask: lists, mask_mod and uncompiled attention say the same."""

import math
import warnings

import pytest
import torch
from hypothesis import given, settings
from torch.nn.attention.flex_attention import flex_attention

from flexmask import flexprefill_mask
from flexmask._torch import RELEASE
from flexmask.block_masks import causal_mask
from tests.cases import Case, Config, cases, structured_inputs
from tests.comparisons import assert_honest, assert_same_attention
from tests.compile_support import assert_same_lists
from tests.expected import expanded, masked_attention, seen_pairs

OPTIONS = {"gamma": 0.6, "tau": 0.3, "block_size": 16, "min_budget": 16}


def inputs(length=200, q_len=None, batch=1, num_heads=4, num_kv_heads=2, head_dim=32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return structured_inputs(generator, batch, num_heads, num_kv_heads, q_len or length, length, head_dim, sharpness=3.0)


@settings(max_examples=60)
@given(cases())
def test_lists_and_mask_mod_say_the_same(case):
    mask = case.config.mask(case.query, case.key, **case.keywords())
    assert_honest(mask, (case.query.shape[2], case.key.shape[2]))
    assert torch.equal(mask.to_dense().bool(), case.search().keep)


@pytest.mark.parametrize(("q_len", "kv_len", "offset"), [(33, 33, 0), (20, 50, 30), (17, 50, 3), (1, 40, 16)])
def test_lists_of_every_window_and_many_paddings_are_honest(q_len, kv_len, offset):
    query, key = torch.zeros(24, 1, q_len, 16), torch.zeros(24, 1, kv_len, 16)
    shares = torch.tensor([0.0, 0.02, 0.5, 0.95, 1.0, 1.0]).repeat_interleave(4)
    tokens = torch.rand(24, kv_len) < shares[:, None]
    offsets = torch.where(torch.arange(24) % 2 == 0, offset, kv_len - q_len)
    for window in (None, *range(1, kv_len + 2), 3 * kv_len):
        mask = causal_mask(query, key, block_size=16, window=window, attention_mask=tokens, q_offset=offsets)
        assert_honest(mask, (q_len, kv_len))
        index = torch.meshgrid(*map(torch.arange, (24, 1, q_len, kv_len)), indexing="ij")
        assert torch.equal(mask.mask_mod(*index)[:, 0], seen_pairs(q_len, offsets, tokens, window))


def test_of_equal_blocks_the_first_are_kept():
    zeros = torch.zeros(1, 1, 256, 16)
    mask = flexprefill_mask(zeros, zeros, 0.45, 1.0, block_size=16, min_budget=0, query_aware="per_query")
    for row, kept in enumerate(mask.to_dense()[0, 0]):
        assert kept.nonzero().flatten().tolist() == sorted({*range(math.ceil(0.45 * (row + 1))), row})


def test_inputs_are_left_as_they_are_and_may_be_written_over():
    query, key = inputs(200, 120)
    offset, attention_mask = torch.tensor(40), torch.arange(200)[None] >= 20
    tensors = (query, key, offset, attention_mask)
    copies = [x.clone() for x in tensors]
    mask = flexprefill_mask(query, key, **OPTIONS, q_offset=offset, attention_mask=attention_mask)
    assert all(torch.equal(*pair) for pair in zip(tensors, copies, strict=True))
    before = mask.to_dense().clone()
    offset += 37
    attention_mask.fill_(False)
    query.zero_()
    key.zero_()
    assert_honest(mask, (120, 200))
    assert torch.equal(mask.to_dense(), before)


def test_inputs_that_require_gradients_give_the_same_mask():
    query, key = inputs()
    wanted = flexprefill_mask(query, key, **OPTIONS)
    mask, stats = flexprefill_mask(query.requires_grad_(), key.requires_grad_(), **OPTIONS, return_stats=True)
    assert_same_lists(mask, wanted)
    assert not stats.coverage.requires_grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize(
    "keywords",
    [{}, {"window": 70}, {"attention_mask": (torch.arange(200)[None] >= 30).long(), "q_offset": torch.tensor([40])}],
    ids=["plain", "window", "padded"],
)
def test_flex_attention_without_compilation_sees_the_block_choice(keywords, dtype):
    query, key = (x.to(dtype) for x in inputs(200, 120 if "q_offset" in keywords else 200))
    value = torch.randn(1, 2, 200, 32, generator=torch.Generator().manual_seed(1)).to(dtype)
    mask = flexprefill_mask(query, key, **OPTIONS, **keywords)
    scores = {"window": keywords["window"]} if "window" in keywords else {}
    others = {name: keywords.get(name) for name in ("attention_mask", "q_offset")}
    case = Case(query, key, Config(**OPTIONS), scores, **others)
    # before 2.10 torch's uncompiled attention rounds products of halves: https://github.com/pytorch/pytorch/pull/163986
    products = torch.float64 if RELEASE >= (2, 10) else dtype
    expected, _ = masked_attention(query, key, value, expanded(case.search().keep, case), product_dtype=products)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it says that it was called without compilation
        out = flex_attention(query, key, value, block_mask=mask, enable_gqa=True)
    assert_same_attention(out, expected)
    whole, _ = masked_attention(query, key, value, expanded(torch.ones_like(case.search().keep), case))
    with pytest.raises(AssertionError, match="not close"):
        assert_same_attention(out, whole)
