"""flexprefill_mask: lists and mask_mod of every window agree; inputs stay; gammas of a tensor."""

import math

import pytest
import torch

from flexmask import flexprefill_mask
from flexmask.block_masks import causal_mask
from tests.cases import structured_inputs
from tests.comparisons import assert_consistent
from tests.compile_support import assert_same_lists
from tests.expected import seen_pairs

OPTIONS = {"gamma": 0.6, "tau": 0.3, "block_size": 16, "min_budget": 16}


def inputs(length=200, q_len=None):
    return structured_inputs(torch.Generator().manual_seed(18), 1, 4, 2, q_len or length, length, 32, sharpness=5.0)


@pytest.mark.parametrize(("q_len", "kv_len", "offset"), [(33, 33, 0), (20, 50, 30), (17, 50, 3), (1, 40, 16)])
def test_lists_and_mask_mod_allow_the_same_pairs_for_every_window_and_many_paddings(q_len, kv_len, offset):
    query, key = torch.zeros(24, 1, q_len, 16), torch.zeros(24, 1, kv_len, 16)
    shares = torch.tensor([0.0, 0.02, 0.5, 0.95, 1.0, 1.0]).repeat_interleave(4)
    tokens = torch.rand(24, kv_len) < shares[:, None]
    offsets = torch.where(torch.arange(24) % 2 == 0, offset, kv_len - q_len)
    for window in (None, *range(1, kv_len + 2), 3 * kv_len):
        mask = causal_mask(query, key, block_size=16, window=window, attention_mask=tokens, q_offset=offsets)
        assert_consistent(mask, (q_len, kv_len))
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
    assert_consistent(mask, (120, 200))
    assert torch.equal(mask.to_dense(), before)


def test_inputs_that_require_gradients_give_the_same_mask():
    query, key = inputs()
    wanted = flexprefill_mask(query, key, **OPTIONS)
    mask, stats = flexprefill_mask(query.requires_grad_(), key.requires_grad_(), **OPTIONS, return_stats=True)
    assert_same_lists(mask, wanted)
    assert not stats.coverage.requires_grad


BY_HEAD = {"block_size": 16, "min_budget": 0}
RULES = {"vertical-slash": {"tau": 0}, "flatten": {"tau": 1}, "per_query": {"tau": 1, "query_aware": "per_query"}}


@pytest.mark.parametrize("rule", RULES)
def test_gammas_of_a_tensor_are_clamped_and_nan_keeps_everything(rule):
    query, key = inputs(240)
    wild = torch.tensor([-3.0, math.inf, math.nan, 0.0])
    found = flexprefill_mask(query, key, wild, **BY_HEAD, **RULES[rule])
    for tame in (torch.tensor([2.0**-30, 1.0, 1.0, 2.0**-30]), [1e-9, 1, 1, 1e-9]):
        assert_same_lists(found, flexprefill_mask(query, key, tame, **BY_HEAD, **RULES[rule]))
    assert wild.isnan().any()


@pytest.mark.parametrize("rule", ["flatten", "per_query"])
def test_gamma_one_keeps_blocks_that_no_row_attends_to(rule):
    query, key = torch.zeros(1, 1, 96, 16), torch.zeros(1, 1, 96, 16)
    query[..., 0], key[:, :, :16, 0] = 100, 100  # all attention to the first block, the others' underflows
    kept = flexprefill_mask(query, key, torch.ones(1), **BY_HEAD, **RULES[rule]).to_dense()
    assert torch.equal(kept[0, 0].bool(), torch.ones(6, 6).tril().bool())


GAMMAS = ((0.43, 1.0, 0.71, 0.91), (1.0, 0.71, 0.91, 0.43))


@pytest.mark.gpu
@pytest.mark.parametrize("form", [tuple, torch.tensor], ids=["tuple", "tensor"])
def test_nothing_waits_for_the_gpu(cuda, nothing_waits, form):
    query, key = inputs(700)
    there, options = [x.to(cuda) for x in (query, key)], {"block_size": 64, "min_budget": 0}
    gamma, other = (form(each, device=cuda) if form is torch.tensor else each for each in GAMMAS)
    flexprefill_mask(*there, gamma, **options)  # compiles, which may wait
    with nothing_waits():
        for each in (gamma, other):
            mask = flexprefill_mask(*there, each, **options)
    expected = flexprefill_mask(query, key, form(GAMMAS[1]), **options)
    assert torch.equal(mask.kv_num_blocks.cpu(), expected.kv_num_blocks)
