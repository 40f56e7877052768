"""A mask of any density, for models with random weights, whose own density means nothing."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from flexmask.base.inputs import attention_inputs
from flexmask.base.visibility import block_visibility, token_validity
from flexmask.flex.block_mask import block_mask
from flexmask.plain.block_lists import block_lists


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
    """Keep a random share `density` of the visible blocks in every head, plus the first block and the diagonal.

    As in `flexprefill_attention`, the block lists alone hold the selection and the mask_mod only cuts partial blocks, so that the
    attention kernel does the same work per block. `flexmask.method.mask_method` would put the selection into the mask_mod too.
    """
    inputs = attention_inputs(query, key, window=window, attention_mask=attention_mask, q_offset=q_offset).placed()
    tokens = token_validity(query.shape[2], key.shape[2], inputs.offset, inputs.attention_mask, key)
    seen = block_visibility(tokens, block_size, window)
    visible = seen.visible[:, None]
    generator = torch.Generator(device=query.device).manual_seed(seed)
    shape = (query.shape[0], query.shape[1], *visible.shape[2:])
    keep = torch.rand(shape, generator=generator, device=query.device) < density
    last = visible.shape[3] - 1 - visible.flip(3).int().argmax(3, keepdim=True)  # of each row's visible blocks
    column = torch.arange(visible.shape[3], device=query.device)
    keep = (keep | (column == last) | (column == 0)) & visible
    return block_mask(inputs, block_lists(keep, seen.full), None, block_size)
