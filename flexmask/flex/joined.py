"""The mask of all heads from the selections of head groups, for pictures."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from flexmask.base.inputs import AttentionInputs, HeadGroup
from flexmask.base.selection import BlockLists, Selected
from flexmask.flex.block_mask import block_mask
from flexmask.flex.mask_mods import MaskMod

Parts = Sequence[tuple[HeadGroup, Selected]]


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
