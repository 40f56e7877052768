"""From a map of kept blocks to the index lists of a BlockMask."""

from __future__ import annotations

import torch
from torch import Tensor

from flexmask.base.search_result import BlockLists


def block_lists(keep: Tensor, full: Tensor) -> BlockLists:
    """Index lists of the kept blocks, split into partial and full ones.

    Parameters
    ----------
    keep
        (batch, num_heads, num_q_blocks, num_kv_blocks) bool.
    full
        (batch or 1, num_q_blocks, num_kv_blocks) bool: every existing entry of the block is visible.
    """
    full = full[:, None]
    return BlockLists(*_ascending_indices(keep & ~full), *_ascending_indices(keep & full))


def _ascending_indices(keep: Tensor) -> tuple[Tensor, Tensor]:
    """Counts and column indices of the True entries of every row."""
    columns = torch.arange(keep.shape[-1], device=keep.device, dtype=torch.int32)
    count = keep.sum(-1, dtype=torch.int32)
    kept_before = keep.cumsum(-1, dtype=torch.int32) - keep.int()
    # kept entries go to the front in order, the others behind them: a permutation, so no two writes meet
    place = torch.where(keep, kept_before, count.unsqueeze(-1) + columns - kept_before)
    indices = torch.zeros_like(kept_before).scatter(-1, place.long(), torch.where(keep, columns, 0))
    return count, indices
