"""Masks in narrower blocks of keys."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from flexmask.base.inputs import attention_inputs, tiled_list_bytes
from flexmask.base.selection import BlockLists, block_lists
from flexmask.flex.block_mask import block_mask_from_lists
from flexmask.flex.run import in_key_tiles
from tests.comparisons import dense_map


def causal(b, h, q_idx, kv_idx):
    return kv_idx <= q_idx


def drawn_mask(kv_len, size=128, rows=3):
    """Random partial and full blocks; entries behind the counts are poisoned."""
    keep, full = (torch.rand(2, heads, rows, -(-kv_len // size)) < 0.5 for heads in (3, 1))
    lists = block_lists(keep, full[:, 0])
    poisoned = [
        torch.where(torch.arange(indices.shape[-1]) < counts.unsqueeze(-1), indices, 7_000)
        for counts, indices in ((lists.kv_num_blocks, lists.kv_indices), (lists.full_kv_num_blocks, lists.full_kv_indices))
    ]
    given = (lists.kv_num_blocks, poisoned[0], lists.full_kv_num_blocks, poisoned[1])
    return block_mask_from_lists(given, causal, size, (rows * size, kv_len)), keep & ~full, keep & full


@pytest.mark.parametrize("kv_len", [1, 63, 64, 65, 128, 129, 192, 193, 1000, 1024])
@pytest.mark.parametrize("tile", [16, 64])
def test_each_block_is_listed_as_its_tiles(kv_len, tile):
    mask, partial, full = drawn_mask(kv_len)
    narrow = in_key_tiles(mask, tile)
    assert narrow.BLOCK_SIZE == (128, tile) and narrow.mask_mod is causal
    assert tuple(narrow.seq_lengths) == (384, kv_len)
    existing = -(-kv_len // tile)
    lists = BlockLists(narrow.kv_num_blocks, narrow.kv_indices, narrow.full_kv_num_blocks, narrow.full_kv_indices)
    for counts, indices, expected in ((*lists[:2], partial), (*lists[2:], full)):
        assert (counts.dtype, indices.dtype) == (torch.int32, torch.int32)
        assert indices.is_contiguous() and indices.shape[-1] == existing
        assert int(indices.min()) >= 0 and int(indices.max()) < existing
        assert torch.equal(dense_map(counts, indices), expected.repeat_interleave(128 // tile, -1)[..., :existing])
        assert bool(((indices.diff(dim=-1) > 0) | (torch.arange(1, existing) >= counts.unsqueeze(-1))).all())


def test_other_sizes_stay():
    mask, *_ = drawn_mask(300)
    assert all(in_key_tiles(mask, tile) is mask for tile in (80, 128, 256))


@pytest.mark.parametrize(("head_dims", "block_size", "lists"), [((256, 256), 128, 3), ((192, 128), 128, 0), ((256, 256), 64, 0)])
def test_memory_counts_the_lists_of_tiles(head_dims, block_size, lists):
    with FakeTensorMode():
        query, key, value = (torch.empty(1, 2, 1000, head_dims[i], device="cuda") for i in (0, 0, 1))
        inputs = attention_inputs(query, key, value)
    assert tiled_list_bytes(inputs, block_size) == lists * 8 * (-(-1000 // block_size)) ** 2
    assert tiled_list_bytes(attention_inputs(torch.empty(1, 2, 9, 256), torch.empty(1, 2, 9, 256)), 128) == 0
