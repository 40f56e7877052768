"""Block lists of every mask of the gallery: shapes, layout, and that they say the same as its mask_mod."""

from __future__ import annotations

import pytest
import torch

from flexmask.block_masks import causal_mask
from tests.block_masks.gallery import (
    SETTINGS,
    all_masks,
    block_map,
    check_lists,
    lists_of,
    made,
    num_blocks,
    settings_and_devices,
)
from tests.comparisons import known_lengths


@all_masks
@settings_and_devices
def test_has_the_shape_and_blocks_that_were_asked_for(name, setting, device):
    chosen, mask = SETTINGS[setting], made(name, setting, device).mask
    batch, heads, q_len, kv_len = mask.shape
    assert (batch, q_len, kv_len) == (chosen.batch, *known_lengths(chosen.q_len, chosen.kv_len, chosen.block_size))
    assert heads in (1, chosen.num_heads)
    assert mask.BLOCK_SIZE == (chosen.block_size, chosen.block_size)


@all_masks
@settings_and_devices
def test_lists_are_contiguous_int32_on_the_inputs_device(name, setting, device):
    chosen, mask = SETTINGS[setting], made(name, setting, device).mask
    rows = (*mask.shape[:2], num_blocks(chosen.q_len, chosen.block_size))
    for tensor, shape in zip(lists_of(mask), 2 * (rows, (*rows, num_blocks(chosen.kv_len, chosen.block_size))), strict=True):
        assert tensor.shape == shape
        assert tensor.dtype == torch.int32
        assert tensor.device.type == device
        assert tensor.is_contiguous()


@all_masks
@settings_and_devices
def test_indices_ascend_and_are_zero_past_the_count(name, setting, device):
    mask = made(name, setting, device).mask
    for counts, indices in (lists_of(mask)[:2], lists_of(mask)[2:]):
        listed = torch.arange(indices.shape[-1], device=device) < counts.unsqueeze(-1)
        assert (counts >= 0).all()
        assert (counts <= indices.shape[-1]).all()
        assert ((indices >= 0) & (indices < indices.shape[-1])).all()
        assert (indices[~listed] == 0).all()
        assert ((indices.diff(dim=-1) > 0) | ~listed[..., 1:]).all()


@all_masks
@settings_and_devices
def test_lists_agree_with_the_mask_mod(name, setting, device):
    check_lists(*made(name, setting, device))


@all_masks
@settings_and_devices
def test_to_dense_and_sparsity_agree_with_the_lists(name, setting, device):
    chosen, mask = SETTINGS[setting], made(name, setting, device).mask
    partial, full = block_map(*lists_of(mask)[:2]), block_map(*lists_of(mask)[2:])
    assert torch.equal(mask.to_dense().cpu().bool(), partial | full)
    pairs_kept = int((partial | full).sum()) * chosen.block_size**2
    q_len, kv_len = known_lengths(chosen.q_len, chosen.kv_len, chosen.block_size)
    assert mask.sparsity() == pytest.approx(100 * (1 - pairs_kept / (chosen.batch * mask.shape[1] * q_len * kv_len)))


@pytest.mark.parametrize("fault", ["dropped", "added", "full and partial swapped", "hidden block called full", "listed twice"])
def test_wrong_list_is_caught(fault):
    _, allowed = made("causal", "whole")
    mask = causal_mask(*SETTINGS["whole"].inputs("cpu"), block_size=32)
    counts, indices, full_counts, full_indices = lists_of(mask)
    if fault == "dropped":
        full_counts[0, 0, 5] -= 1
    elif fault == "added":
        indices[0, 0, 3, 1] = 6
        counts[0, 0, 3] += 1
    elif fault == "full and partial swapped":
        mask.kv_num_blocks, mask.full_kv_num_blocks = full_counts, counts
        mask.kv_indices, mask.full_kv_indices = full_indices, indices
    elif fault == "hidden block called full":
        full_indices[0, 0, 4, 4] = 4
        full_counts[0, 0, 4] += 1
        counts[0, 0, 4] = 0
    else:
        full_indices[0, 0, 4, 4] = 4
        full_counts[0, 0, 4] += 1
    with pytest.raises(AssertionError):
        check_lists(mask, allowed)
