"""Build the BlockMask of index lists; every method's mask comes from here."""

from __future__ import annotations

import copyreg
import functools
import weakref
from typing import Any

import torch
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
    lengths = (inputs.query.shape[2], inputs.key.shape[2])
    mask = block_mask_from_lists(lists, mask_mod, block_size, lengths)
    if not torch.compiler.is_compiling():
        parts = (lists, keep, block_size, name, lengths, inputs.window, inputs.attention_mask, inputs.offset)
        # by a weak reference: a cycle would keep the memory of dropped masks until Python looks for cycles
        owner = weakref.ref(mask)
        mask.__reduce_ex__ = functools.partial(_pickled, owner, mask_mod, parts)  # type: ignore[method-assign]  # of this mask alone
        mask.to = functools.partial(_moved, owner, mask_mod, parts)  # type: ignore[method-assign]  # of this mask alone
    return mask


def _is_as_made(mask: BlockMask, mask_mod: Any, parts: tuple[Any, ...]) -> bool:
    return mask.mask_mod is mask_mod and all(getattr(mask, field) is tensor for field, tensor in parts[0]._asdict().items())


def _moved(owner: weakref.ref[BlockMask], mask_mod: Any, parts: tuple[Any, ...], device: torch.device | str) -> BlockMask:
    """The mask on `device`, what its mask_mod captures too, which BlockMask's own method leaves behind."""
    mask = owner()  # None of a mask that had no name: ``flexprefill_mask(...).to(device)``
    if mask is not None and not _is_as_made(mask, mask_mod, parts):
        return BlockMask.to(mask, device)
    rest: list[Any] = [part.to(device) if isinstance(part, Tensor) else part for part in parts[1:]]
    return _unpickled(BlockLists(*(x.to(device) for x in parts[0])), *rest)


def _pickled(owner: weakref.ref[BlockMask], mask_mod: Any, parts: tuple[Any, ...], protocol: int) -> tuple[Any, ...]:
    """How pickle and deepcopy make the mask again: its mask_mod is a closure, which does not pickle."""
    mask = owner()
    assert mask is not None
    if _is_as_made(mask, mask_mod, parts):
        return _unpickled, parts
    # changed since: as any BlockMask, which deepcopy takes, and pickle where it takes the mask_mod
    state = {name: value for name, value in vars(mask).items() if name not in ("__reduce_ex__", "to")}
    return copyreg.__newobj__, (BlockMask,), state  # type: ignore[attr-defined]  # typeshed lacks it


def _unpickled(
    lists: BlockLists,
    keep: Tensor | None,
    block_size: int,
    name: str | None,
    lengths: tuple[int, int],
    window: int | None,
    attention_mask: Tensor | None,
    offset: Tensor | None,
) -> BlockMask:
    """`block_mask` again, of what a pickled one is made of; of query and key it reads the lengths and the device alone."""
    batch = lists.kv_indices.shape[0]
    query, key = (lists.kv_indices.new_empty(()).expand(batch, 1, length, 1) for length in lengths)
    inputs = AttentionInputs(query, key, None, 1.0, None, window, attention_mask, offset)
    return block_mask(inputs, lists, keep, block_size, name)


def with_gradients(mask: BlockMask) -> BlockMask:
    """`mask` with the lists by key block that the backward pass reads, twice the memory."""
    assert mask.full_kv_num_blocks is not None and mask.full_kv_indices is not None
    lists = (mask.kv_num_blocks, mask.kv_indices, mask.full_kv_num_blocks, mask.full_kv_indices)
    q_len, kv_len = mask.shape[-2:]
    return block_mask_from_lists(lists, mask.mask_mod, mask.BLOCK_SIZE[0], (q_len, kv_len), with_gradients=True)
