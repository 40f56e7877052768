"""A BlockMask in narrower blocks of keys, for kernels that take fewer keys at a time than a block holds."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from flexmask.base.visibility import num_blocks
from flexmask.flex.block_mask import block_mask_from_lists


def in_key_tiles(mask: BlockMask, tile: int) -> BlockMask:
    """The same pairs, listed by `tile` keys; `mask` itself if its blocks are no multiple of that.

    Indices ascend in `mask`, as FLASH asks, so that what the last key block lacks is the end of its list. Reads no value on the
    host.
    """
    rows, columns = mask.BLOCK_SIZE
    if columns == tile or columns % tile:
        return mask
    lengths = mask.seq_lengths
    counts, indices = _narrow(mask.kv_num_blocks, mask.kv_indices, columns // tile, num_blocks(lengths[1], tile))
    full_counts, full_indices = mask.full_kv_num_blocks, mask.full_kv_indices
    if full_counts is None or full_indices is None:
        full_counts, full_indices = torch.zeros_like(counts), torch.zeros_like(indices)
    else:
        full_counts, full_indices = _narrow(full_counts, full_indices, columns // tile, indices.shape[-1])
    return block_mask_from_lists((counts, indices, full_counts, full_indices), mask.mask_mod, (rows, tile), lengths)


def _narrow(counts: Tensor, indices: Tensor, parts: int, existing: int) -> tuple[Tensor, Tensor]:
    """Counts and indices of the parts of each listed block; `existing` parts exist."""
    entry = torch.arange(existing, device=indices.device)
    listed = indices.index_select(-1, entry // parts) * parts + (entry % parts).to(indices.dtype)
    listed = listed.clamp(max=existing - 1)  # behind the count
    last = indices.gather(-1, (counts - 1).clamp(min=0).long().unsqueeze(-1)).squeeze(-1)
    lacking = ((last + 1) * parts - existing).clamp(min=0).to(counts.dtype)
    return torch.where(counts > 0, counts * parts - lacking, 0).to(counts.dtype), listed
