"""Padded lists of kept key blocks with their counts."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from flexmask.base.selection import ascending_indices
from flexmask.export.listed import kept_and_full


def to_index_list(mask: BlockMask, *, fill: int = -1) -> tuple[Tensor, Tensor]:
    """The kept key blocks of every query block, partial and full ones in one list, as TensorRT-LLM's kernels read them.

    The block that cuts the diagonal is the last of its row (the last two, where a chunk does not begin at a block); the kernel
    must apply causality inside it, and windows and padding inside the blocks that they cut.

    Reads no value on the host, so lists have room for every block; cut them at ``counts.max()`` if the kernel wants short ones.

    Parameters
    ----------
    mask
        A BlockMask, of flexmask or not.
    fill
        What stands past the count.

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
