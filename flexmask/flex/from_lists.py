"""A BlockMask of index lists, on every release of torch."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from flexmask._torch import FROM_KV_BLOCKS
from flexmask.flex.mask_mods import MaskMod


def block_mask_from_lists(
    lists: tuple[Tensor, Tensor, Tensor, Tensor],
    mask_mod: MaskMod,
    block_size: int,
    lengths: tuple[int, int],
    with_gradients: bool = False,
) -> BlockMask:
    """A BlockMask from partial counts and indices, then full counts and indices.

    Lists by key block, twice the memory, are made only `with_gradients` (torch >= 2.9 can leave them out).
    """
    optional: dict[str, Any] = {"seq_lengths": lengths, "compute_q_blocks": with_gradients}
    known = {name: value for name, value in optional.items() if name in FROM_KV_BLOCKS}
    return BlockMask.from_kv_blocks(*lists, BLOCK_SIZE=block_size, mask_mod=mask_mod, **known)
