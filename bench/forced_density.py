"""A mask of any density, for models with random weights, whose own density says nothing."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from flexmask._torch import block_mask_from_lists
from flexmask.emit import block_lists
from flexmask.flexprefill import device_offset
from flexmask.mask_mods import visible_mask_mod
from flexmask.visibility import block_visibility, token_validity


def random_blocks_mask(
    query: Tensor,
    key: Tensor,
    *,
    density: float,
    seed: int = 0,
    block_size: int = 128,
    window: int | None = None,
    attention_mask: Tensor | None = None,
    q_offset: int | Tensor | None = None,
) -> BlockMask:
    """Random visible blocks, a share `density` of them in every head, with the first block and the diagonal; `seed` fixes them.

    The mask_mod cuts partial blocks only: the choice is in the lists, as compiled attention reads them.
    """
    offset = device_offset(q_offset, query, key)
    tokens = token_validity(query.shape[2], key.shape[2], offset, attention_mask, key)
    seen = block_visibility(tokens, block_size, window)
    visible = seen.visible[:, None]
    generator = torch.Generator(device=query.device).manual_seed(seed)
    shape = (query.shape[0], query.shape[1], *visible.shape[2:])
    keep = torch.rand(shape, generator=generator, device=query.device) < density
    last = visible.shape[3] - 1 - visible.flip(3).int().argmax(3, keepdim=True)  # of each row's visible blocks
    column = torch.arange(visible.shape[3], device=query.device)
    keep = (keep | (column == last) | (column == 0)) & visible
    mask_mod = visible_mask_mod(offset, None if attention_mask is None else attention_mask != 0, window, query.device)
    return block_mask_from_lists(block_lists(keep, seen.full), mask_mod, block_size, (query.shape[2], key.shape[2]))
