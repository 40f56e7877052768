"""The BlockMask of index lists, of one selection or of those of head groups."""

from __future__ import annotations

import copyreg
import functools
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from flexmask._torch import FROM_KV_BLOCKS, is_traced
from flexmask.base.inputs import AttentionInputs, HeadGroup
from flexmask.base.selection import BlockLists, Selected
from flexmask.flex.mask_mods import MaskMod, kept_mask_mod, limited_mask_mod, named, visible_mask_mod

Parts = Sequence[tuple[HeadGroup, Selected]]


def block_mask(inputs: AttentionInputs, selected: Selected) -> BlockMask:
    """The BlockMask of kept blocks, for inputs `with_offset`; with the lists by key block where the inputs need gradients."""
    mask_mod, title = visible_mask_mod(inputs), selected.title
    if selected.keep is not None:
        mask_mod = kept_mask_mod(mask_mod, selected.keep, selected.block_size)
    if selected.mask_mod is not None:
        mask_mod = limited_mask_mod(mask_mod, selected.mask_mod, title or "own")
    elif title is not None:
        mask_mod = named(mask_mod, title)
    lengths = (inputs.query.shape[2], inputs.key.shape[2])
    mask = block_mask_from_lists(selected.lists, mask_mod, selected.block_size, lengths, inputs.needs_grad)
    if not is_traced():
        parts = (selected, lengths, inputs.window, inputs.attention_mask, inputs.offset)
        # a cycle would keep dropped masks in memory until garbage collection
        owner = weakref.ref(mask)
        mask.__reduce_ex__ = functools.partial(_pickled, owner, mask_mod, parts)  # type: ignore[method-assign]  # of this mask alone
        mask.to = functools.partial(_moved, owner, mask_mod, parts)  # type: ignore[method-assign]  # of this mask alone
    return mask


def parts_of(mask: BlockMask) -> tuple[Selected, tuple[int, int], int | None, Tensor | None, Tensor | None] | None:
    """What `block_mask` made a mask of: blocks, (q_len, kv_len), window, attention_mask and offset; None if it is another's.

    A mask that was changed since is another's, and so is one that was made in a surrounding compilation.
    """
    maker = vars(mask).get("__reduce_ex__")
    if not isinstance(maker, functools.partial) or maker.func is not _pickled or maker.args[0]() is not mask:
        return None
    mask_mod, parts = maker.args[1:]
    return parts if _is_as_made(mask, mask_mod, parts) else None


def _is_as_made(mask: BlockMask, mask_mod: Any, parts: tuple[Any, ...]) -> bool:
    return mask.mask_mod is mask_mod and all(getattr(mask, field) is tensor for field, tensor in parts[0].lists._asdict().items())


def _moved(owner: weakref.ref[BlockMask], mask_mod: Any, parts: tuple[Any, ...], device: torch.device | str) -> BlockMask:
    """The mask on `device`, with its mask_mod's tensors, which BlockMask's own method leaves behind."""
    mask = owner()  # None for ``flexprefill_mask(...).to(device)``
    if mask is not None and not _is_as_made(mask, mask_mod, parts):
        return BlockMask.to(mask, device)
    rest: list[Any] = [part.to(device) if isinstance(part, Tensor) else part for part in parts[1:]]
    lists, keep = BlockLists(*(x.to(device) for x in parts[0].lists)), parts[0].keep
    return _unpickled(parts[0]._replace(lists=lists, keep=None if keep is None else keep.to(device)), *rest)


def _pickled(owner: weakref.ref[BlockMask], mask_mod: Any, parts: tuple[Any, ...], protocol: int) -> tuple[Any, ...]:
    """Parts from which pickle and deepcopy rebuild the mask, whose mask_mod is a closure."""
    mask = owner()
    assert mask is not None
    if _is_as_made(mask, mask_mod, parts):
        return _unpickled, parts
    # changed since: as any BlockMask
    state = {name: value for name, value in vars(mask).items() if name not in ("__reduce_ex__", "to")}
    return copyreg.__newobj__, (BlockMask,), state  # type: ignore[attr-defined]  # typeshed lacks it


def _unpickled(
    selected: Selected, lengths: tuple[int, int], window: int | None, attention_mask: Tensor | None, offset: Tensor | None
) -> BlockMask:
    """`block_mask` from its parts; of query and key it reads only lengths and device."""
    indices = selected.lists.kv_indices
    query, key = (indices.new_empty(()).expand(indices.shape[0], 1, length, 1) for length in lengths)
    return block_mask(AttentionInputs(query, key, None, 1.0, None, window, attention_mask, offset), selected)


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


def joined_mask(parts: Parts, inputs: AttentionInputs) -> BlockMask:
    """The mask of every head of `inputs`, `with_offset`, copied from the selections of its groups."""
    heads = (inputs.query.shape[0], inputs.query.shape[1])

    def join(tensors: list[Tensor]) -> Tensor:
        whole = tensors[0].new_empty((*heads, *tensors[0].shape[2:]))
        for (group, _), part in zip(parts, tensors, strict=True):
            whole[group.batch, group.query] = part
        return whole

    selected = [each for _, each in parts]
    lists = BlockLists(*(join(list(tensors)) for tensors in zip(*(each.lists for each in selected), strict=True)))
    maps = [each.keep for each in selected if each.keep is not None]
    own = None if selected[0].mask_mod is None else _by_group(parts)
    return block_mask(inputs, selected[0]._replace(lists=lists, keep=join(maps) if maps else None, mask_mod=own))


def _by_group(parts: Parts) -> MaskMod:
    def by_group(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        visible = torch.zeros_like(q_idx, dtype=torch.bool)
        for (rows, heads, _), selected in parts:
            row, head = b.clamp(rows.start, rows.stop - 1), h.clamp(heads.start, heads.stop - 1)
            assert selected.mask_mod is not None
            own = selected.mask_mod(row - rows.start, head - heads.start, q_idx, kv_idx)
            visible = visible | ((row == b) & (head == h) & own)
        return visible

    return by_group
