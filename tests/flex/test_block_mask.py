"""Masks that are saved, loaded, copied, moved and joined."""

import copy
import gc
import io
import pickle
import weakref

import pytest
import torch
from torch.nn.attention.flex_attention import BlockMask, and_masks

from flexmask import flexprefill_mask
from flexmask.block_masks import causal_mask
from tests.attention_calls import padding
from tests.compile_support import assert_same_lists


def saved(mask):
    file = io.BytesIO()
    torch.save(mask, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


WAYS = {"torch.save": saved, "pickle": lambda mask: pickle.loads(pickle.dumps(mask)), "deepcopy": copy.deepcopy}
CASES = {
    "whole": {},
    "padded, window, offset": {
        "attention_mask": padding(160, ("left", 40), ("holes", 7)),
        "window": 70,
        "q_offset": torch.tensor([10, 3]),
    },
}


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@pytest.mark.parametrize("method", ["flexprefill", "causal"])
def test_mask_comes_back_the_same(way, case, method):
    query, key = 3 * torch.randn(2, 4, 130, 16), torch.randn(2, 2, 160, 16)
    if method == "causal":
        mask = causal_mask(query, key, block_size=32, **case)
    else:
        mask = flexprefill_mask(query, key, gamma=0.5, block_size=32, min_budget=0, **case)
    got = way(mask)
    assert type(got) is type(mask)
    assert_same_lists(got, mask)
    assert got.BLOCK_SIZE == mask.BLOCK_SIZE
    assert got.shape == mask.shape
    assert got.mask_mod.__name__ == mask.mask_mod.__name__
    pairs = torch.meshgrid(*(torch.arange(size) for size in (2, 4, 130, 160)), indexing="ij")
    visible = got.mask_mod(*pairs)
    assert torch.equal(visible, mask.mask_mod(*pairs))
    assert visible.any() and not visible.all()
    assert got.kv_indices.data_ptr() != mask.kv_indices.data_ptr()
    assert_same_lists(way(got), mask)


def test_changed_mask_is_not_taken_for_the_one_that_was_made():
    query = torch.randn(1, 2, 96, 16)
    mask = flexprefill_mask(query, query, block_size=32)
    mask.mask_mod = and_masks(mask.mask_mod, lambda b, h, q, k: k > 5)
    assert copy.deepcopy(mask).mask_mod is mask.mask_mod
    assert copy.copy(mask).mask_mod is mask.mask_mod
    for save in (pickle.dumps, saved):
        with pytest.raises((AttributeError, pickle.PicklingError), match="local"):
            save(mask)


def everything(b, h, q, k):
    return k >= 0


def test_mask_with_a_mask_mod_of_a_module_is_pickled():
    query = torch.randn(1, 2, 96, 16)
    mask = flexprefill_mask(query, query, block_size=32)
    mask.mask_mod = everything
    for way in WAYS.values():
        got = way(mask)
        assert type(got) is BlockMask
        assert got.mask_mod is everything
        assert_same_lists(got, mask)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_mask_moves_with_what_its_mask_mod_captures(case):
    query, key = torch.randn(2, 4, 130, 16), torch.randn(2, 2, 160, 16)
    mask = flexprefill_mask(query, key, gamma=0.5, block_size=32, min_budget=0, **case)
    index = [torch.zeros(1, dtype=torch.int32, device="meta")] * 4
    nameless = flexprefill_mask(query, key, gamma=0.5, block_size=32, min_budget=0, **case).to("meta")
    for moved in (mask.to("meta"), nameless):
        assert moved.kv_indices.device.type == "meta"
        assert moved.mask_mod(*index).device.type == "meta"
    assert_same_lists(saved(mask.to("cpu")), mask)
    assert torch.equal(mask.to("cpu").to_dense(), mask.to_dense())
    mask.mask_mod = everything
    assert mask.to("cpu").mask_mod is everything


def test_dropped_mask_is_freed_at_once():
    query = torch.randn(1, 2, 96, 16)
    mask = flexprefill_mask(query, query, block_size=32)
    lists = weakref.ref(mask.kv_indices)
    gc.disable()
    try:
        del mask
        assert lists() is None
    finally:
        gc.enable()
