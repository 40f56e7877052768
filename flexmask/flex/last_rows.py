"""The last rows of a call, whose query blocks keep every visible block, attend to the keys in parts.

Such a query block takes as long as many sparse ones. The kernel gives it to one multiprocessor, which then runs alone at the end
of the call. Copies of these rows, each with a part of the keys, run at the same time instead.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from flexmask._torch import HAS_TRITON, on_device
from flexmask.base.inputs import AttentionInputs
from flexmask.base.selection import BlockLists
from flexmask.base.visibility import num_blocks

if HAS_TRITON:
    from flexmask.kernels.last_rows import part_lists

_MIN_BLOCKS = 8  # key blocks per part and query block of the copy; shorter parts were not tried


class LastRows(NamedTuple):
    """The last rows of calls of one shape, and the lists of their copies. From `last_rows_in_parts`."""

    rows: int  # that keep everything
    copied: int  # rows of a copy, whole blocks: at least `rows`
    parts: int  # of the keys, one for each copy
    lists: BlockLists  # of (batch, num_heads) heads and parts * copied rows
    is_sparse: Tensor  # (num_q_blocks,) int32, 0 for the query blocks that keep everything


def num_sms(device: torch.device) -> int:
    """Multiprocessors of a GPU; 0 elsewhere."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 0


def last_rows_in_parts(inputs: AttentionInputs, block_size: int) -> LastRows | None:
    """Parts for a causal call whose last row is at the last key; None if it has too few keys, or many heads.

    Query blocks with one of the last `block_size` rows keep every visible block. The second call has the copies as its rows, the
    last copy at the rows' own positions. Of 24 key blocks, three copies of the last query block attend to::

        position of the copy   key blocks
        21                     0 to 7
        22                     8 to 15
        23                     16 to 23

    The kernel's causal mask hides keys after a row, so the part of each copy but the last must end before the copy's first row.
    """
    batch, num_heads, q_len, _ = inputs.query.shape
    q_blocks, kv_len, device = num_blocks(q_len, block_size), inputs.key.shape[2], inputs.query.device
    kv_blocks, dense_blocks = num_blocks(kv_len, block_size), q_blocks - max(0, q_len // block_size - 1)
    parts = min(num_sms(device) // (batch * num_heads * dense_blocks), kv_blocks // (dense_blocks * _MIN_BLOCKS))
    copied = dense_blocks * block_size
    if parts < 2 or q_len <= copied:
        return None
    is_sparse = torch.ones(q_blocks, dtype=torch.int32, device=device)
    is_sparse[-dense_blocks:] = 0
    with on_device(device):
        lists = part_lists(inputs.query, (batch, num_heads), dense_blocks, parts, kv_len, block_size)
    rows = q_len - (q_blocks - dense_blocks) * block_size
    return LastRows(rows, copied, parts, lists, is_sparse)


def without_last_rows(lists: BlockLists, last_rows: LastRows) -> BlockLists:
    """The lists of a call without the full blocks of the last rows; the indices are shared."""
    return lists._replace(full_kv_num_blocks=lists.full_kv_num_blocks * last_rows.is_sparse)


def copies(query: Tensor, last_rows: LastRows) -> Tensor:
    """The rows of all copies, (batch, num_heads, parts * copied, head_dim)."""
    return query[:, :, -last_rows.copied :].repeat(1, 1, last_rows.parts, 1)


def split_copies(x: Tensor, last_rows: LastRows) -> Tensor:
    """A result of the kernel for the copies, (batch, num_heads, parts * copied, ..), as (parts, batch, num_heads, rows, ..)."""
    return x.unflatten(2, (last_rows.parts, last_rows.copied))[:, :, :, -last_rows.rows :].movedim(2, 0)
