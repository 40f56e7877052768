"""Maps of kept blocks, and padded lists of kept key blocks with their counts."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from flexmask.base.selection import ascending_indices
from flexmask.export.listed import kept_and_full

_DTYPES = (torch.bool, torch.uint8, torch.int32)


def to_block_map(mask: BlockMask, *, dtype: torch.dtype = torch.bool) -> Tensor:
    """Which blocks a mask keeps, as a dense map.

    Kept blocks are computed, others are skipped. The block that cuts the diagonal is kept like any other: the kernel must apply
    causality inside it, and windows and padding inside the blocks that they cut.

    Reads no value on the host.

    Parameters
    ----------
    mask
        A BlockMask, of flexmask or not.
    dtype
        torch.bool, or torch.uint8 or torch.int32 for kernels that read numbers; 1 is a kept block.

    Returns
    -------
    Tensor
        (batch, num_heads, num_q_blocks, num_kv_blocks), contiguous, on the mask's device; batch and num_heads are the mask's own,
        1 where all share a row. Query block i holds the rows ``i * block_size`` up to ``(i + 1) * block_size - 1`` of the chunk,
        key block j the keys of the same numbers.

    Raises
    ------
    TypeError
        For anything but a BlockMask, and for another dtype.

    Examples
    --------
    >>> import torch
    >>> from flexmask.block_masks import causal_mask
    >>> from flexmask.export import to_block_map
    >>> query = torch.randn(1, 2, 64, 16)
    >>> to_block_map(causal_mask(query, query, block_size=32), dtype=torch.uint8)[0, 0]
    tensor([[1, 0],
            [1, 1]], dtype=torch.uint8)
    """
    if dtype not in _DTYPES:
        raise TypeError(f"dtype must be one of {', '.join(map(str, _DTYPES))}; got {dtype}")
    return kept_and_full(mask)[0].to(dtype)


def to_index_list(mask: BlockMask, *, fill: int = -1) -> tuple[Tensor, Tensor]:
    """The kept key blocks of every query block, partial and full ones in one list, as TensorRT-LLM's kernels read them.

    The block that cuts the diagonal is the last of its row (the last two, where a chunk does not begin at a block); the kernel
    must apply causality inside it, and windows and padding inside the blocks that they cut.

    Reads no value on the host, so lists have room for every block; cut them at ``counts.max()`` if the kernel takes short ones.

    Parameters
    ----------
    mask
        A BlockMask, of flexmask or not.
    fill
        The value past the count.

    Returns
    -------
    indices : Tensor
        (batch, num_heads, num_q_blocks, num_kv_blocks) int32, ascending and without duplicates in the first `counts` entries.
    counts : Tensor
        (batch, num_heads, num_q_blocks) int32; 0 for rows that keep nothing.

    Raises
    ------
    TypeError
        For anything but a BlockMask.

    Examples
    --------
    >>> import torch
    >>> from flexmask.block_masks import causal_mask
    >>> from flexmask.export import to_index_list
    >>> query = torch.randn(1, 1, 64, 16)
    >>> indices, counts = to_index_list(causal_mask(query, query, block_size=32))
    >>> indices[0, 0]
    tensor([[ 0, -1],
            [ 0,  1]], dtype=torch.int32)
    >>> counts[0, 0]
    tensor([1, 2], dtype=torch.int32)
    """
    counts, indices = ascending_indices(kept_and_full(mask)[0])
    entry = torch.arange(indices.shape[-1], device=indices.device)
    return torch.where(entry < counts.unsqueeze(-1), indices, fill), counts
