"""Build the BlockMask of index lists; every method's mask comes from here."""

from __future__ import annotations

import copy
import functools
import pickle
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
        # of this mask alone: the object is asked before its type
        mask.__reduce_ex__ = functools.partial(_pickled, owner, mask_mod, parts)  # type: ignore[method-assign]
        mask.to = functools.partial(_moved, owner, mask_mod, parts)  # type: ignore[method-assign]
    return mask


def _is_as_made(mask: BlockMask, mask_mod: Any, parts: tuple[Any, ...]) -> bool:
    return mask.mask_mod is mask_mod and all(getattr(mask, field) is tensor for field, tensor in parts[0]._asdict().items())


def _moved(owner: weakref.ref[BlockMask], mask_mod: Any, parts: tuple[Any, ...], device: torch.device | str) -> BlockMask:
    """The mask on `device`, what its mask_mod captures too, which BlockMask's own method leaves behind."""
    mask = owner()
    assert mask is not None
    if not _is_as_made(mask, mask_mod, parts):
        return BlockMask.to(mask, device)
    rest: list[Any] = [part.to(device) if isinstance(part, Tensor) else part for part in parts[1:]]
    return _unpickled(BlockLists(*(x.to(device) for x in parts[0])), *rest)


def _pickled(owner: weakref.ref[BlockMask], mask_mod: Any, parts: tuple[Any, ...], protocol: int) -> tuple[Any, ...]:
    """How pickle and deepcopy make the mask again: its mask_mod is a closure, which does not pickle."""
    mask = owner()
    assert mask is not None
    return (_unpickled, parts) if _is_as_made(mask, mask_mod, parts) else _by_fields(owner, protocol)


def copied_by_fields(mask: BlockMask) -> BlockMask:
    """`mask`, which pickle refuses in words of ours unless its mask_mod can be pickled."""
    mask.__reduce_ex__ = functools.partial(_by_fields, weakref.ref(mask))  # type: ignore[method-assign]
    return mask


def _by_fields(owner: weakref.ref[BlockMask], protocol: int) -> tuple[Any, ...]:
    return _of_fields, (_Fields(vars(owner())),)


class _Fields:
    """The fields of a BlockMask that is copied as any other is, and pickled where its mask_mod can be."""

    def __init__(self, fields: dict[str, Any]) -> None:
        self.fields = {name: value for name, value in fields.items() if name not in ("__reduce_ex__", "to")}

    def __deepcopy__(self, memo: dict[int, Any]) -> _Fields:
        return _Fields(copy.deepcopy(self.fields, memo))

    def __reduce__(self) -> tuple[Any, ...]:
        try:
            pickle.dumps(self.fields["mask_mod"])
        except (AttributeError, TypeError, pickle.PicklingError) as error:
            raise TypeError(
                "a mask can be pickled as flexprefill_mask or a method of the gallery returns it; got one that was changed or "
                f"joined, whose mask_mod is a function within another ({self.fields['mask_mod']!r}): "
                "save the mask from before that, or its kv_num_blocks, kv_indices, full_kv_num_blocks and full_kv_indices"
            ) from error
        return _Fields, (self.fields,)


def _of_fields(fields: _Fields) -> BlockMask:
    """A BlockMask of these fields."""
    mask: BlockMask = object.__new__(BlockMask)
    vars(mask).update(fields.fields)
    return mask


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
    query, key = (lists.kv_indices.new_empty(()).expand(1, 1, length, 1) for length in lengths)
    inputs = AttentionInputs(query, key, None, 1.0, None, window, attention_mask, offset)
    return block_mask(inputs, lists, keep, block_size, name)


def with_gradients(mask: BlockMask) -> BlockMask:
    """`mask` with the lists by key block that the backward pass reads, twice the memory."""
    assert mask.full_kv_num_blocks is not None and mask.full_kv_indices is not None
    lists = (mask.kv_num_blocks, mask.kv_indices, mask.full_kv_num_blocks, mask.full_kv_indices)
    q_len, kv_len = mask.shape[-2:]
    return block_mask_from_lists(lists, mask.mask_mod, mask.BLOCK_SIZE[0], (q_len, kv_len), with_gradients=True)
