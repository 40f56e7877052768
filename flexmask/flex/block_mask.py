"""Build the BlockMask of index lists; every method's mask comes from here."""

from __future__ import annotations

from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from flexmask._torch import block_mask_from_lists, named
from flexmask.base.inputs import AttentionInputs
from flexmask.base.search_result import BlockLists
from flexmask.flex.mask_mods import kept_mask_mod, visible_mask_mod


def block_mask(
    inputs: AttentionInputs, lists: BlockLists, keep: Tensor | None, block_size: int, name: str | None = None
) -> BlockMask:
    """The BlockMask of `lists` for a placed problem.

    Parameters
    ----------
    inputs
        Whose visibility the mask_mod applies inside partial blocks.
    lists
        Of (batch, num_heads or 1) heads.
    keep
        (batch, num_heads, num_q_blocks, num_kv_blocks) bool: the mask_mod holds the block choice too, so that ``to_dense()`` and
        uncompiled flex_attention agree with the lists. None: it holds visibility alone, and the lists do the selection.
    name
        Title of the mask_mod. Default None: what it hides.
    """
    visible = visible_mask_mod(inputs)
    if keep is not None:
        visible = kept_mask_mod(visible, keep, block_size)
    mask_mod = visible if name is None else named(visible, name)
    return block_mask_from_lists(lists, mask_mod, block_size, (inputs.query.shape[2], inputs.key.shape[2]))


def with_gradients(mask: BlockMask) -> BlockMask:
    """`mask` with the lists by key block that the backward pass reads, twice the memory."""
    assert mask.full_kv_num_blocks is not None and mask.full_kv_indices is not None
    lists = (mask.kv_num_blocks, mask.kv_indices, mask.full_kv_num_blocks, mask.full_kv_indices)
    q_len, kv_len = mask.shape[-2:]
    return block_mask_from_lists(lists, mask.mask_mod, mask.BLOCK_SIZE[0], (q_len, kv_len), with_gradients=True)
