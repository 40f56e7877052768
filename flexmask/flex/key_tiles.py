"""A BlockMask in narrower blocks of keys, for FLASH, which takes fewer keys at a time of wide heads than a block holds."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from flexmask.base.inputs import AttentionInputs
from flexmask.base.visibility import num_blocks
from flexmask.flex.block_mask import block_mask_from_lists


def flash_key_tile(head_dim: int, v_head_dim: int) -> int:
    """Keys that FLASH takes at a time on Hopper: its own tile, or, where no block is a multiple of that, 64."""
    return 128 if head_dim <= 128 or (head_dim <= 192 and v_head_dim <= 128) else 64


def tiled_list_bytes(inputs: AttentionInputs, block_size: int) -> int:
    """Bytes of one head's lists by block and by tile in one batch row; 0 where FLASH takes the blocks as they are."""
    query, value = inputs.query, inputs.value
    if value is None or not query.is_cuda:
        return 0
    tile = flash_key_tile(query.shape[3], value.shape[3])
    if block_size <= tile or block_size % tile:
        return 0
    pairs = num_blocks(query.shape[2], block_size) * num_blocks(inputs.key.shape[2], block_size)
    return 8 * pairs * (1 + block_size // tile)


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
    # in place: lists are large
    listed = indices.index_select(-1, entry // parts).mul_(parts).add_((entry % parts).to(indices.dtype))
    listed.clamp_(max=existing - 1)  # behind the count
    last = indices.gather(-1, (counts - 1).clamp(min=0).long().unsqueeze(-1)).squeeze(-1)
    lacking = ((last + 1) * parts - existing).clamp(min=0).to(counts.dtype)
    return torch.where(counts > 0, counts * parts - lacking, 0).to(counts.dtype), listed
