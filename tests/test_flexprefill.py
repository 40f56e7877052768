"""flexprefill_mask: a BlockMask that says the same by its lists, by its mask_mod and as a whole."""

import warnings

import pytest
import torch
from hypothesis import given, settings
from torch.nn.attention.flex_attention import flex_attention

from flexmask import SelectionStats, flexprefill_mask
from flexmask._torch import RELEASE
from flexmask.block_masks import published_mask
from tests.cases import Case, Config, cases, structured_inputs
from tests.comparisons import assert_honest, assert_same_attention, known_lengths
from tests.expected import expanded, masked_attention

OPTIONS = {"gamma": 0.6, "tau": 0.3, "block_size": 16, "min_budget": 16}
LISTS = ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices")


def inputs(length=200, q_len=None, batch=1, num_heads=4, num_kv_heads=2, head_dim=32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return structured_inputs(generator, batch, num_heads, num_kv_heads, q_len or length, length, head_dim, sharpness=3.0)


def lengths_of(query, key):
    return query.shape[2], key.shape[2]


def mask_of(case):
    return case.config.mask(case.query, case.key, **case.keywords())


def assert_same_lists(mask, other):
    for name in LISTS:
        assert torch.equal(getattr(mask, name), getattr(other, name)), name


@settings(max_examples=60)
@given(cases())
def test_lists_and_mask_mod_say_the_same(case):
    mask = mask_of(case)
    assert_honest(mask, lengths_of(case.query, case.key))
    assert torch.equal(mask.to_dense().bool(), case.search().keep)


def test_lists_and_mask_mod_say_the_same_in_published_selection():
    query, key = inputs(192)
    mask = published_mask(query, key, **OPTIONS)
    assert_honest(mask, (192, 192))
    assert (mask.to_dense() == 0)[..., torch.ones(12, 12).tril().bool()].any()


def test_shape_and_block_size():
    mask = flexprefill_mask(*inputs(200, 150, batch=2), **OPTIONS)
    assert mask.shape == (2, 4, *known_lengths(150, 200, 16))
    assert mask.BLOCK_SIZE == (16, 16)
    assert mask.kv_indices.shape == (2, 4, 10, 13)
    assert mask.mask_mod.__name__.startswith("flexprefill(block_size=16, gamma=0.6, tau=0.3, min_budget=16")


def test_statistics_come_when_asked_for():
    query, key = inputs(batch=2)
    mask, stats = flexprefill_mask(query, key, **OPTIONS, return_stats=True)
    assert_same_lists(mask, flexprefill_mask(query, key, **OPTIONS))
    assert isinstance(stats, SelectionStats)
    assert stats.dense is False
    assert stats.is_query_aware.dtype == torch.bool
    for name in ("is_query_aware", "js_distance", "density", "num_vertical_blocks", "num_slash_blocks", "coverage"):
        assert getattr(stats, name).shape == (2, 4), name
    causal = mask.to_dense().shape[-1] * (mask.to_dense().shape[-1] + 1) / 2
    torch.testing.assert_close(stats.density, mask.to_dense().sum((-2, -1)) / causal)


def test_defaults_keep_a_short_prompt_whole():
    query, key = inputs(1000, num_heads=2)
    mask = flexprefill_mask(query, key)
    assert torch.equal(mask.to_dense().bool(), torch.ones(8, 8).tril().bool().expand(1, 2, 8, 8))


def test_q_offset_forms_agree():
    query, key = inputs(200, 120, batch=2)
    wanted = flexprefill_mask(query, key, **OPTIONS, q_offset=48)
    for offset in (torch.tensor(48), torch.tensor([48, 48]), torch.tensor([48, 48], dtype=torch.int32)):
        mask = flexprefill_mask(query, key, **OPTIONS, q_offset=offset)
        assert_same_lists(mask, wanted)
        assert_honest(mask, (120, 200))
    last = flexprefill_mask(query, key, **OPTIONS)
    assert_same_lists(last, flexprefill_mask(query, key, **OPTIONS, q_offset=80))
    assert_same_lists(last, flexprefill_mask(query, key, **OPTIONS, q_offset=torch.tensor(10_000)))
    assert not torch.equal(last.to_dense(), wanted.to_dense())


def test_attention_mask_forms_agree():
    query, key = inputs(batch=2)
    valid = torch.arange(200)[None] >= torch.tensor([[30], [0]])
    wanted = flexprefill_mask(query, key, **OPTIONS, attention_mask=valid)
    for dtype in (torch.int64, torch.int32, torch.uint8):
        assert_same_lists(flexprefill_mask(query, key, **OPTIONS, attention_mask=valid.to(dtype)), wanted)


def test_tensors_written_over_after_the_call_do_not_change_the_mask():
    query, key = inputs(200, 120)
    offset, attention_mask = torch.tensor(40), torch.arange(200)[None] >= 20
    mask = flexprefill_mask(query, key, **OPTIONS, q_offset=offset, attention_mask=attention_mask)
    before = mask.to_dense().clone()
    offset += 37
    attention_mask.fill_(False)
    query.zero_()
    key.zero_()
    assert_honest(mask, (120, 200))
    assert torch.equal(mask.to_dense(), before)


def test_inputs_are_left_as_they_are():
    query, key = inputs(200, 120)
    offset, attention_mask = torch.tensor([40]), (torch.arange(200)[None] >= 20).long()
    tensors = (query, key, offset, attention_mask)
    copies = [x.clone() for x in tensors]
    flexprefill_mask(query, key, **OPTIONS, q_offset=offset, attention_mask=attention_mask)
    assert all(torch.equal(*pair) for pair in zip(tensors, copies, strict=True))


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


@pytest.mark.gpu
def test_lists_and_mask_mod_say_the_same_on_cuda(cuda):
    query, key = inputs(777, batch=2, num_heads=8)
    valid = torch.arange(777)[None] >= torch.tensor([[100], [0]])
    mask = flexprefill_mask(query.to(cuda), key.to(cuda), **OPTIONS, window=300, attention_mask=valid.to(cuda))
    assert_honest(mask, (777, 777))
    assert mask.kv_indices.device.type == "cuda"
    case = Case(query, key, Config(**OPTIONS), {"window": 300}, valid)
    expected = case.reference()
    clear = expected.margin > 1e-5
    assert torch.equal(mask.to_dense().bool().cpu()[clear], expected.keep[clear])
