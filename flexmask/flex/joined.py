"""Join the BlockMasks of head groups into one, for pictures."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from flexmask._torch import block_mask_from_lists, named
from flexmask.base.inputs import AttentionInputs, HeadGroup


def joined_mask(masks: list[BlockMask], inputs: AttentionInputs) -> BlockMask:
    """The mask of all heads of `inputs`, from the masks of its groups in the order of `head_groups`.

    A single mask that has every head already is returned itself. The lists are copied; each group's mask_mod answers for its own
    heads, so that the whole one is for pictures and tests, not for kernels.
    """
    batch, num_heads, q_len, _ = inputs.query.shape
    if len(masks) == 1:
        return masks[0]
    groups, row, head = [], 0, 0
    for mask in masks:
        rows, heads = mask.kv_num_blocks.shape[:2]
        groups.append(HeadGroup(slice(row, row + rows), slice(head, head + heads), slice(0)))
        head = (head + heads) % num_heads
        row += rows if head == 0 else 0
    assert (row, head) == (batch, 0), "groups that are not those of the problem"

    def join(parts: list[Tensor]) -> Tensor:
        whole = parts[0].new_empty((batch, num_heads, *parts[0].shape[2:]))
        for group, part in zip(groups, parts, strict=True):
            whole[group.batch, group.query] = part
        return whole

    def joined(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        visible = torch.zeros_like(q_idx, dtype=torch.bool)
        for group, mask in zip(groups, masks, strict=True):
            first_row, first_head = group.batch.start, group.query.start
            here = (b >= first_row) & (b < group.batch.stop) & (h >= first_head) & (h < group.query.stop)
            own_row = (b - first_row).clamp(0, group.batch.stop - first_row - 1)
            own_head = (h - first_head).clamp(0, group.query.stop - first_head - 1)
            visible = visible | (here & mask.mask_mod(own_row, own_head, q_idx, kv_idx))
        return visible

    full = [(mask.full_kv_num_blocks, mask.full_kv_indices) for mask in masks]
    counts = [torch.zeros_like(mask.kv_num_blocks) if n is None else n for mask, (n, _) in zip(masks, full, strict=True)]
    indices = [torch.zeros_like(mask.kv_indices) if i is None else i for mask, (_, i) in zip(masks, full, strict=True)]
    lists = (
        join([mask.kv_num_blocks for mask in masks]),
        join([mask.kv_indices for mask in masks]),
        join(counts),
        join(indices),
    )
    mask_mod = named(joined, f"{masks[0].mask_mod.__name__}, {len(masks)} groups of heads")
    return block_mask_from_lists(lists, mask_mod, masks[0].BLOCK_SIZE[0], (q_len, inputs.key.shape[2]))
