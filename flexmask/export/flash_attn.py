"""The block-sparse tensors of flash-attn-4 (``flash_attn.cute``), for calls without FlexAttention."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from flexmask.base.options import check_count
from flexmask.base.selection import ascending_indices
from flexmask.export.index_lists import kept_and_full, num_kv_blocks


class FlashBlocks(NamedTuple):
    """Fields of flash-attn-4's ``BlockSparseTensorsTorch``, whose order differs between its releases."""

    mask_block_cnt: Tensor  # (batch, num_heads, num_q_blocks) int32
    mask_block_idx: Tensor  # (batch, num_heads, num_q_blocks, num_kv_blocks) int32
    full_block_cnt: Tensor
    full_block_idx: Tensor
    block_size: tuple[int, int]


def to_flash_attn(mask: BlockMask, *, kv_tile: int | None = None) -> FlashBlocks:
    """Lists for flash-attn-4: ``BlockSparseTensorsTorch(**to_flash_attn(mask)._asdict())``.

    ``_flash_attn_fwd(.., mask_mod=.., block_sparse_tensors=..)`` computes full blocks whole, and calls its mask_mod inside the
    others: the blocks that cut the diagonal, a window or padding, in ``mask_block_idx``. That mask_mod, a CuTe function, is yours
    to write; it sees the rows of the chunk, not their positions. Reads no value on the host.

    The kernel's tiles must fit: ``block_size[0]`` is a multiple of its query tile, ``block_size[1]`` is its key tile. On Hopper
    both are 128 for head_dim 64 and 128. Above, pass ``tile_mn`` to the kernel and its key tile as `kv_tile`, such as
    ``(128, 64)`` for head_dim 256.

    Parameters
    ----------
    mask
        A BlockMask, of flexmask or not.
    kv_tile
        Keys per listed block, a divisor of the mask's block size; default: that size.

    Returns
    -------
    FlashBlocks
        int32 on the mask's device, indices ascending, entries past the count 0. batch and num_heads are the mask's; heads are
        query heads.

    Raises
    ------
    TypeError, ValueError
        For anything but a BlockMask; for a `kv_tile` that does not divide the mask's block size.

    Examples
    --------
    >>> import torch
    >>> from flexmask.block_masks import causal_mask
    >>> from flexmask.export import to_flash_attn
    >>> query = torch.randn(1, 1, 64, 16)
    >>> blocks = to_flash_attn(causal_mask(query, query, block_size=32))
    >>> blocks.mask_block_idx[0, 0, :, 0], blocks.full_block_cnt[0, 0]
    (tensor([0, 1], dtype=torch.int32), tensor([0, 1], dtype=torch.int32))
    """
    kept, full = kept_and_full(mask)
    rows, columns = mask.BLOCK_SIZE
    tile = columns if kv_tile is None else kv_tile
    check_count("kv_tile", tile, 1, "keys")
    if columns % tile:
        raise ValueError(f"kv_tile must divide the mask's block size {columns}; got {kv_tile!r}")
    if tile != columns:
        # the last block may end in the middle
        existing = num_kv_blocks(mask, tile)
        kept, full = (x.repeat_interleave(columns // tile, -1)[..., :existing] for x in (kept, full))
    return FlashBlocks(*ascending_indices(kept & ~full), *ascending_indices(full), (rows, tile))
