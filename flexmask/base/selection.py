"""A method's choice, and the selection made of it: index lists, the map of kept blocks, and statistics."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask


class BlockLists(NamedTuple):
    """The four tensors of a BlockMask: contiguous int32, disjoint, indices ascending, entries past the count 0."""

    kv_num_blocks: Tensor  # (batch, num_heads, num_q_blocks)
    kv_indices: Tensor  # (batch, num_heads, num_q_blocks, num_kv_blocks)
    full_kv_num_blocks: Tensor
    full_kv_indices: Tensor


def block_lists(keep: Tensor, full: Tensor) -> BlockLists:
    """Lists of the blocks in `keep`, (batch, num_heads, num_q_blocks, num_kv_blocks) bool; `full`, without heads, splits them."""
    full = full[:, None]
    return BlockLists(*ascending_indices(keep & ~full), *ascending_indices(keep & full))


def ascending_indices(keep: Tensor) -> tuple[Tensor, Tensor]:
    """Counts and column indices of the True entries of every row."""
    columns = torch.arange(keep.shape[-1], device=keep.device, dtype=torch.int32)
    count = keep.sum(-1, dtype=torch.int32)
    kept_before = keep.cumsum(-1, dtype=torch.int32) - keep.int()
    # a permutation, kept entries first: no two writes collide
    rank = torch.where(keep, kept_before, count.unsqueeze(-1) + columns - kept_before)
    indices = torch.zeros_like(kept_before).scatter(-1, rank.long(), torch.where(keep, columns, 0))
    return count, indices


def kept_and_full(mask: BlockMask, num_kv_blocks: int) -> tuple[Tensor, Tensor]:
    """Listed blocks and the full ones among them, (batch, num_heads, num_q_blocks, num_kv_blocks) bool."""
    partial = listed_blocks(mask.kv_num_blocks, mask.kv_indices, num_kv_blocks)
    if mask.full_kv_num_blocks is None:
        return partial, torch.zeros_like(partial)
    assert mask.full_kv_indices is not None
    full = listed_blocks(mask.full_kv_num_blocks, mask.full_kv_indices, num_kv_blocks)
    return partial | full, full


def listed_blocks(counts: Tensor, indices: Tensor, num_kv_blocks: int) -> Tensor:
    """True at the first `counts` of the `indices` of each row, (.., num_q_blocks, num_kv_blocks) bool; others are ignored."""
    # lists of other code may have a dtype that holds no larger number than theirs
    counts, indices = counts.long(), indices.long()
    entry = torch.arange(indices.shape[-1], device=indices.device)
    is_listed = (entry < counts.unsqueeze(-1)) & (indices >= 0) & (indices < num_kv_blocks)
    # the rest goes to one more column
    column = torch.where(is_listed, indices, num_kv_blocks)
    marks = torch.zeros((*counts.shape, num_kv_blocks + 1), dtype=torch.bool, device=indices.device)
    return marks.scatter(-1, column, True)[..., :num_kv_blocks].contiguous()


class ChosenBlocks(NamedTuple):
    """A map of chosen blocks, before lines and the blocks kept always are added, and the heads that have one."""

    chosen: Tensor  # (batch, num_heads, num_q_blocks, num_kv_blocks), bool in plain steps, int8 in kernels; nonzero: chosen
    active_heads: Tensor | None = None  # (batch, num_heads) bool: heads that choose blocks; None: all


class Selection(NamedTuple):
    """The result of a method's run: the choice's lists and map, computed statistics, and what the mask_mod needs."""

    lists: BlockLists  # for num_heads heads, or 1 where all share them
    # (batch, num_heads or 1, num_q_blocks, num_kv_blocks) bool, in the mask_mod too; None: that holds visibility only
    keep: Tensor | None
    stats: dict[str, Tensor]  # (batch, num_heads) each, by name (`flexmask.stats`)
    block_size: int
    title: str | None = None  # becomes the name of the mask_mod
    # a user's mask_mod, which hides more pairs
    mask_mod: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor] | None = None

    def without_heads(self, head_slices: Sequence[slice]) -> Selection:
        """The selection with empty lists for these query heads; its indices are those of this selection."""
        counts, full_counts = self.lists.kv_num_blocks.clone(), self.lists.full_kv_num_blocks.clone()
        for heads in head_slices:
            counts[:, heads] = 0
            full_counts[:, heads] = 0
        return self.with_fields(lists=BlockLists(counts, self.lists.kv_indices, full_counts, self.lists.full_kv_indices))

    def with_fields(self, **fields: Any) -> Selection:
        """The selection with other values in some fields; torch 2.5 cannot trace `_replace`."""
        return Selection(**{name: fields[name] if name in fields else getattr(self, name) for name in _FIELDS})


_FIELDS = Selection._fields


class Choice(NamedTuple):
    """The result of `Method.select`: lists, map, and functions for the statistics that lists do not give."""

    lists: BlockLists
    keep: Tensor | None  # (batch, num_heads, num_q_blocks, num_kv_blocks) bool
    # statistics that lists do not give, by name (`flexmask.stats`): from the map to (batch, num_heads)
    statistics: Mapping[str, Callable[[Tensor], Tensor]] = {}
    # a user's mask_mod, which hides more pairs
    mask_mod: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor] | None = None
