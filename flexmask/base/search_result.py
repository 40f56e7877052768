"""The outcome of a search: index lists, the map of kept blocks, statistics."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor


class BlockLists(NamedTuple):
    """The four tensors of a BlockMask: contiguous int32, indices ascending, entries past the count 0.

    Partial blocks (``kv_*``) go through mask_mod, full ones (``full_kv_*``) do not; a block is never in both.
    """

    kv_num_blocks: Tensor  # (batch, num_heads, num_q_blocks)
    kv_indices: Tensor  # (batch, num_heads, num_q_blocks, num_kv_blocks)
    full_kv_num_blocks: Tensor
    full_kv_indices: Tensor


class SearchResult(NamedTuple):
    """The blocks that a search keeps."""

    lists: BlockLists
    keep: Tensor | None  # (batch, num_heads, num_q_blocks, num_kv_blocks) bool
    stats: Any  # the tensors of FlexPrefillStats but is_dense, in its order; None if not asked for
