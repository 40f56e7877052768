"""From a map of kept blocks to index lists."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flexmask.base.selection import block_lists


def listed_one_by_one(keep):
    """Column numbers of every row's True entries, then zeros."""
    width = keep.shape[-1]
    rows = [[j for j, kept in enumerate(row) if kept] for row in keep.flatten(0, -2).tolist()]
    counts = torch.tensor([len(row) for row in rows]).view(keep.shape[:-1])
    indices = torch.tensor([row + [0] * (width - len(row)) for row in rows]).view(keep.shape)
    return counts, indices


@given(
    st.tuples(st.integers(1, 2), st.integers(1, 3), st.integers(1, 9), st.integers(1, 12)),
    st.sampled_from([0.0, 0.1, 0.5, 0.9, 1.0]),
    st.integers(0, 2**31),
)
def test_lists_hold_kept_blocks_in_order_and_zeros_behind(shape, share, seed):
    generator = torch.Generator().manual_seed(seed)
    keep = torch.rand(shape, generator=generator) < share
    full = torch.rand(shape[0], *shape[2:], generator=generator) < 0.5
    lists = block_lists(keep, full)
    for (counts, indices), kept in ((lists[:2], keep & ~full[:, None]), (lists[2:], keep & full[:, None])):
        expected_counts, expected_indices = listed_one_by_one(kept)
        assert torch.equal(counts.long(), expected_counts)
        assert torch.equal(indices.long(), expected_indices)
        assert counts.dtype == indices.dtype == torch.int32
        assert counts.is_contiguous()
        assert indices.is_contiguous()


def test_one_map_of_full_blocks_serves_the_whole_batch():
    keep = torch.rand(3, 2, 5, 7, generator=torch.Generator().manual_seed(0)) < 0.5
    full = torch.rand(1, 5, 7, generator=torch.Generator().manual_seed(1)) < 0.5
    for one, each in zip(block_lists(keep, full), block_lists(keep, full.expand(3, -1, -1)), strict=True):
        assert torch.equal(one, each)


@pytest.mark.parametrize("layout", ["transposed", "sliced"])
def test_lists_are_contiguous_whatever_the_map_is(layout):
    keep = torch.rand(2, 3, 8, 8, generator=torch.Generator().manual_seed(0)) < 0.5
    keep = keep.transpose(2, 3) if layout == "transposed" else keep[:, :, ::2, 1:7]
    full = torch.zeros(1, *keep.shape[2:], dtype=torch.bool)
    lists = block_lists(keep, full)
    assert all(x.is_contiguous() for x in lists)
    assert torch.equal(lists.kv_indices.long(), listed_one_by_one(keep)[1])
