"""The BlockMask of index lists, of one selection or of those of head groups, and its ``mask_mod(b, h, q_idx, kv_idx)``."""

from __future__ import annotations

import copyreg
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, SupportsIndex

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask
from torch.utils._pytree import tree_map_only

from flexmask._torch import CPU_TAKES_UNBACKED_SIZES, FROM_KV_BLOCKS, RELEASE, is_traced, materialized
from flexmask.base.inputs import AttentionInputs, HeadGroup, PositionedInputs
from flexmask.base.selection import BlockLists, Selection

MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def visible_mask_mod(inputs: PositionedInputs) -> MaskMod:
    """The mask_mod of causality, padding and window.

    Attention is compiled once per ``__name__``, which names the kind of inputs and no values.
    """
    window, attention_mask = inputs.window, inputs.attention_mask
    name = f"visible(window={window is not None}, padded={attention_mask is not None}, shifted={inputs.offset is not None})"
    offset = None if inputs.offset is None else captured(inputs.offset)
    valid = None if attention_mask is None else captured(attention_mask)
    reach = None if window is None else captured_number(window, inputs.key.shape[0], inputs.key.device)

    def visible(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        position = q_idx if offset is None else q_idx + offset[b]
        mask = kv_idx <= position
        if reach is not None:
            mask = mask & (position - kv_idx < reach[b])
        if valid is not None:
            mask = mask & valid[b, kv_idx] & valid[b, position]
        return mask

    return named(visible, name)


def limited_mask_mod(visible: MaskMod, user_mask_mod: MaskMod, name: str) -> MaskMod:
    """`visible`, limited to what a user's mask_mod of that name allows."""

    def limited(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return user_mask_mod(b, h, q_idx, kv_idx) & visible(b, h, q_idx, kv_idx)

    return named(limited, f"{name} and {visible.__name__}")


def kept_mask_mod(visible: MaskMod, keep: Tensor, block_size: int) -> MaskMod:
    """`visible`, limited to the blocks of `keep`, (batch, num_heads or 1, num_q_blocks, num_kv_blocks) bool."""
    shared = keep.shape[1] == 1
    # torch 2.5 reads a number among a mask_mod's indices on the host, which fails
    keep = captured(keep.squeeze(1) if shared else keep)
    side = captured_number(block_size, keep.shape[0], keep.device)

    def kept(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        q_block, kv_block = q_idx // side[b], kv_idx // side[b]
        is_kept = keep[b, q_block, kv_block] if shared else keep[b, h, q_block, kv_block]
        return is_kept & visible(b, h, q_idx, kv_idx)

    return named(kept, f"kept and {visible.__name__}")


def captured(tensor: Tensor) -> Tensor:
    """`tensor` in a form that a mask_mod may capture: itself on accelerators, on CPUs a view that torch can compile."""
    if tensor.device.type != "cpu":
        return tensor
    if is_traced():
        # nothing can be marked; indexing by a range keeps Inductor from folding a constant
        return materialized(tensor[torch.arange(tensor.shape[0], device=tensor.device)])
    view = tensor.detach()
    # FlexAttention's C++ template replaces ``ks1`` by ``cur_qSplitSize``, hence a symbolic size ``ks12`` by an undeclared name;
    # unbacked sizes are named ``ku0``, and a size of 1 is never symbolic
    if CPU_TAKES_UNBACKED_SIZES:
        for dim, size in enumerate(view.shape):
            if size > 1:
                torch._dynamo.decorators.mark_unbacked(view, dim)
    return view


def captured_number(number: int, batch: int, device: torch.device) -> Tensor:
    """`number`, clamped, as a tensor that a mask_mod may capture, (batch,) int32. A mask_mod can capture no symbolic int."""
    return captured(torch.full((batch,), min(number, 2**31 - 1), dtype=torch.int32, device=device))


def named(function: MaskMod, name: str) -> MaskMod:
    """`function` with another ``__name__``; in a surrounding compilation only where torch traces that (2.8.0 does, 2.5.1 not)."""
    if RELEASE >= (2, 8) or not is_traced():
        function.__name__ = name
    return function


class MaskParts(NamedTuple):
    """The parts of a mask that `block_mask` made, as pickles hold them."""

    selection: Selection
    lengths: tuple[int, int]  # q_len, kv_len
    window: int | None
    attention_mask: Tensor | None
    offset: Tensor | None

    def mask(self) -> BlockMask:
        inputs = inputs_of_mask(self.selection.lists.kv_indices, self.lengths, self.window, self.attention_mask, self.offset)
        return block_mask(inputs, self.selection)


def block_mask(inputs: PositionedInputs, selection: Selection) -> BlockMask:
    """The BlockMask of a selection; if the inputs need gradients, also with lists by key block."""
    mask_mod, title = visible_mask_mod(inputs), selection.title
    if selection.keep is not None:
        mask_mod = kept_mask_mod(mask_mod, selection.keep, selection.block_size)
    if selection.mask_mod is not None:
        mask_mod = limited_mask_mod(mask_mod, selection.mask_mod, title or "own")
    elif title is not None:
        mask_mod = named(mask_mod, title)
    lengths = (inputs.query.shape[2], inputs.key.shape[2])
    mask = block_mask_from_lists(selection.lists, mask_mod, selection.block_size, lengths, inputs.needs_grad)
    if not is_traced():
        parts = MaskParts(selection, lengths, inputs.window, inputs.attention_mask, inputs.offset)
        # weak, or a cycle would keep dropped masks in memory until garbage collection
        origin = _MaskOrigin(weakref.ref(mask), mask_mod, parts)
        # on the object: a subclass is no BlockMask to pytrees, which go by class, and copyreg would change everybody's masks
        mask.__reduce_ex__ = origin.pickled  # type: ignore[method-assign]  # of this mask alone
        mask.to = origin.to  # type: ignore[method-assign]  # of this mask alone
    return mask


def parts_of(mask: BlockMask) -> MaskParts | None:
    """The parts from which `block_mask` made `mask`; None if it was changed, or was made otherwise or in a compilation."""
    origin = getattr(vars(mask).get("__reduce_ex__"), "__self__", None)
    return origin.parts if isinstance(origin, _MaskOrigin) and origin.mask_ref() is mask and origin.is_still(mask) else None


class _MaskOrigin(NamedTuple):
    """The parts from which `block_mask` made a mask, and the mask."""

    mask_ref: weakref.ref[BlockMask]  # the mask
    mask_mod: MaskMod
    parts: MaskParts

    def is_still(self, mask: BlockMask) -> bool:
        """True unless `mask` was changed since."""
        lists = self.parts.selection.lists._asdict()
        return mask.mask_mod is self.mask_mod and all(getattr(mask, name) is tensor for name, tensor in lists.items())

    def to(self, device: torch.device | str) -> BlockMask:
        """The mask on `device`, with its mask_mod's tensors, which BlockMask's own method leaves behind."""
        mask = self.mask_ref()  # None for ``flexprefill_mask(...).to(device)``
        if mask is not None and not self.is_still(mask):
            return BlockMask.to(mask, device)
        moved: MaskParts = tree_map_only(Tensor, lambda tensor: tensor.to(device), self.parts)
        return moved.mask()

    def pickled(self, protocol: SupportsIndex) -> tuple[Any, ...]:
        """Parts from which pickle and deepcopy rebuild the mask, whose mask_mod is a closure."""
        mask = self.mask_ref()
        assert mask is not None
        if self.is_still(mask):
            return MaskParts.mask, (self.parts,)
        # changed since: as any BlockMask
        state = {name: value for name, value in vars(mask).items() if name not in ("__reduce_ex__", "to")}
        return copyreg.__newobj__, (BlockMask,), state  # type: ignore[attr-defined]  # typeshed lacks it


def inputs_of_mask(
    batch_like: Tensor, lengths: tuple[int, int], window: int | None, attention_mask: Tensor | None, offset: Tensor | None
) -> PositionedInputs:
    """Placeholder inputs for building a mask: query and key carry only lengths, device and the batch size of `batch_like`."""
    query, key = (batch_like.new_empty(()).expand(batch_like.shape[0], 1, length, 1) for length in lengths)
    return AttentionInputs(query, key, None, 1.0, None, window, attention_mask, offset).with_offset()


def block_mask_from_lists(
    lists: tuple[Tensor, Tensor, Tensor, Tensor],
    mask_mod: MaskMod,
    block_size: int | tuple[int, int],
    lengths: tuple[int, int],
    with_gradients: bool = False,
) -> BlockMask:
    """A BlockMask from `BlockLists`; `with_gradients` adds lists by key block, twice the memory (always before torch 2.9)."""
    optional: dict[str, Any] = {"seq_lengths": lengths, "compute_q_blocks": with_gradients}
    keywords = {name: value for name, value in optional.items() if name in FROM_KV_BLOCKS}
    return BlockMask.from_kv_blocks(*lists, BLOCK_SIZE=block_size, mask_mod=mask_mod, **keywords)


def joined_mask(parts: Sequence[tuple[HeadGroup, Selection]], inputs: PositionedInputs) -> BlockMask:
    """The mask of all heads of `inputs`, copied from the selections of the groups of heads."""
    heads = (inputs.query.shape[0], inputs.query.shape[1])

    def join(tensors: list[Tensor]) -> Tensor:
        whole = tensors[0].new_empty((*heads, *tensors[0].shape[2:]))
        for (group, _), part in zip(parts, tensors, strict=True):
            whole[group.batch_rows, group.query_heads] = part
        return whole

    selections = [selection for _, selection in parts]
    lists = BlockLists(*(join(list(tensors)) for tensors in zip(*(selection.lists for selection in selections), strict=True)))
    maps = [selection.keep for selection in selections if selection.keep is not None]
    # only a user's function has a mask_mod, and its heads are one group
    return block_mask(inputs, selections[0]._replace(lists=lists, keep=join(maps) if maps else None))
