"""A mask as a map of kept blocks, as padded index lists, and as the parts that flexmask made it of."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from flexmask._torch import KNOWS_LENGTHS
from flexmask.base.checks import check_int
from flexmask.base.selection import ascending_indices, kept_and_full
from flexmask.base.visibility import num_blocks
from flexmask.flex.block_mask import MaskParts, parts_of

_DTYPES = (torch.bool, torch.uint8, torch.int32)


def to_block_map(mask: BlockMask, *, dtype: torch.dtype = torch.bool) -> Tensor:
    """The blocks that a mask keeps, as a dense map. Reads no value on the host.

    The kernel must apply causality inside the block that cuts the diagonal, and windows and padding inside those that they cut.

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
    >>> query = torch.randn(1, 2, 64, 16)
    >>> to_block_map(causal_mask(query, query, block_size=32), dtype=torch.uint8)[0, 0]
    tensor([[1, 0],
            [1, 1]], dtype=torch.uint8)
    """
    if dtype not in _DTYPES:
        raise TypeError(f"dtype must be one of {', '.join(map(str, _DTYPES))}; got {dtype}")
    return blocks_of(mask)[0].to(dtype)


def to_index_list(mask: BlockMask, *, fill: int = -1) -> tuple[Tensor, Tensor]:
    """The kept key blocks of every query block, partial and full ones in one list, as TensorRT-LLM's kernels read them.

    The block that cuts the diagonal is the last of its row (the last two, where a chunk does not begin at a block); see
    `to_block_map` for what the kernel must apply inside. Reads no value on the host, so lists have room for every block; cut them
    at ``counts.max()`` if the kernel accepts short ones.

    Parameters
    ----------
    mask
        A BlockMask, of flexmask or not.
    fill
        The value past the count, an int32. Default -1.

    Returns
    -------
    indices : Tensor
        (batch, num_heads, num_q_blocks, num_kv_blocks) int32, ascending and without duplicates in the first `counts` entries.
    counts : Tensor
        (batch, num_heads, num_q_blocks) int32; 0 for rows that keep nothing.

    Raises
    ------
    TypeError, ValueError
        For anything but a BlockMask, and for a `fill` that is no int32.

    Examples
    --------
    >>> import torch
    >>> from flexmask.block_masks import causal_mask
    >>> query = torch.randn(1, 1, 64, 16)
    >>> indices, counts = to_index_list(causal_mask(query, query, block_size=32))
    >>> indices[0, 0]
    tensor([[ 0, -1],
            [ 0,  1]], dtype=torch.int32)
    >>> counts[0, 0]
    tensor([1, 2], dtype=torch.int32)
    """
    check_int("fill", fill)
    if not -(2**31) <= fill < 2**31:
        raise ValueError(f"fill must fit into int32; got {fill}")
    counts, indices = ascending_indices(blocks_of(mask)[0])
    entry = torch.arange(indices.shape[-1], device=indices.device)
    return torch.where(entry < counts.unsqueeze(-1), indices, int(fill)), counts


def blocks_of(mask: BlockMask) -> tuple[Tensor, Tensor]:
    """`kept_and_full` of any BlockMask."""
    if not isinstance(mask, BlockMask):
        raise TypeError(f"mask must be a BlockMask; got {type(mask).__name__}")
    return kept_and_full(mask, num_kv_blocks(mask))


def num_kv_blocks(mask: BlockMask, tile: int | None = None) -> int:
    """Number of key blocks, or tiles, that hold a key; index lists of other code may be shorter or longer."""
    size = mask.BLOCK_SIZE[1]
    if KNOWS_LENGTHS:
        kv_len = mask.seq_lengths[1]
    else:
        parts = parts_of(mask)
        kv_len = mask.kv_indices.shape[-1] * size if parts is None else parts.lengths[1]
    return num_blocks(kv_len, size if tile is None else tile)


def require_parts(mask: BlockMask, target: str) -> MaskParts:
    """The parts of a mask that flexmask made; a mask with another mask_mod is refused, because what that hides is unknown."""
    parts = parts_of(mask)
    if parts is None:
        raise NotImplementedError(
            f"{target} needs a mask as a flexmask method or from_block_map gives it, unchanged: what another mask_mod hides is "
            "unknown"
        )
    return parts
