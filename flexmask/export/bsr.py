"""Block compressed sparse rows, as FlashInfer's ``BlockSparseAttentionWrapper`` and sparse matrix libraries read them."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from flexmask.export.index_lists import check_index, geometry, kept_and_full


class BsrBlocks(NamedTuple):
    """A block-sparse matrix of rows and keys."""

    indptr: Tensor  # (rows + 1,) int32: first entry of every row of blocks
    indices: Tensor  # (entries,) int32: its key blocks, ascending
    mask: Tensor | None  # (entries, block_size, block_size) bool: pairs that are seen
    shape: tuple[int, int]  # rows and keys, whole blocks
    block_size: int


def to_bsr(mask: BlockMask, *, head: int = 0, row: int = 0, with_pairs: bool = False) -> BsrBlocks:
    """One head's blocks as BSR. The number of entries is a shape, so this reads it on the host.

    FlashInfer takes one matrix for all heads: pass a mask of one head (of a method that shares its blocks), or plan per head.

    Parameters
    ----------
    mask
        A BlockMask; with `with_pairs` one that flexmask made.
    head, row
        Which head and which prompt; 0 where all share.
    with_pairs
        Add the pairs that are seen inside each block, by the mask_mod: causality, windows and padding. 16 KB per block of 128.

    Returns
    -------
    BsrBlocks
        On the mask's device. FlashInfer's ``causal=True`` serves the block that cuts the diagonal, the last of its row, where
        q_len and kv_len are multiples of the block size, or q_len equals kv_len.

    Raises
    ------
    NotImplementedError, TypeError, ValueError
        With `with_pairs`, for masks that flexmask did not make; for anything but a BlockMask; for a head or row that it lacks.

    Examples
    --------
    >>> import torch
    >>> from flexmask.block_masks import causal_mask
    >>> from flexmask.export import to_bsr
    >>> query = torch.randn(1, 1, 64, 16)
    >>> blocks = to_bsr(causal_mask(query, query, block_size=32))
    >>> blocks.indptr, blocks.indices
    (tensor([0, 1, 3], dtype=torch.int32), tensor([0, 0, 1], dtype=torch.int32))
    """
    kept, _ = kept_and_full(mask)
    check_index("row", row, kept.shape[0])
    check_index("head", head, kept.shape[1])
    if mask.BLOCK_SIZE[0] != mask.BLOCK_SIZE[1]:
        raise ValueError(f"mask must have square blocks; got {mask.BLOCK_SIZE}")
    if with_pairs:
        where = geometry(mask, "with_pairs")
    kept, size = kept[row, head], mask.BLOCK_SIZE[0]
    counts = kept.sum(-1, dtype=torch.int32)
    indptr = torch.nn.functional.pad(counts.cumsum(0, dtype=torch.int32), (1, 0))
    q_block, kv_block = kept.nonzero(as_tuple=True)
    pairs = None
    if with_pairs:
        step = torch.arange(size, device=kept.device)
        q_idx = (q_block[:, None] * size + step)[:, :, None].expand(-1, -1, size)
        kv_idx = (kv_block[:, None] * size + step)[:, None, :].expand(-1, size, -1)
        exists = (q_idx < where.lengths[0]) & (kv_idx < where.lengths[1])
        # rows and keys past the end index nothing
        inside = (torch.where(exists, q_idx, 0), torch.where(exists, kv_idx, 0))
        prompt, of_head = (torch.full_like(q_idx, number) for number in (row, head))
        pairs = mask.mask_mod(prompt, of_head, *inside) & exists
    return BsrBlocks(indptr, kv_block.to(torch.int32), pairs, (kept.shape[0] * size, kept.shape[1] * size), size)
