"""Masks as other kernels read them: block compressed sparse rows, flash-attn-4's lists, FlashInfer's variable blocks."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from flexmask.base.checks import check_int, plain_number
from flexmask.base.option_checks import check_count
from flexmask.base.selection import ascending_indices
from flexmask.export.index_lists import blocks_of, num_kv_blocks, require_parts


class BsrBlocks(NamedTuple):
    """A block-sparse matrix of rows and keys."""

    indptr: Tensor  # (rows + 1,) int32: first entry of every row of blocks
    indices: Tensor  # (entries,) int32: its key blocks, ascending
    mask: Tensor | None  # (entries, block_size, block_size) bool: pairs that are seen
    shape: tuple[int, int]  # rows and keys, whole blocks
    block_size: int


def to_bsr(mask: BlockMask, *, head: int = 0, batch_index: int = 0, with_pairs: bool = False) -> BsrBlocks:
    """One head's blocks as BSR. The number of entries is a shape, so this reads it on the host.

    FlashInfer reads one matrix for all heads: pass a mask of one head (of a method that shares its blocks), or plan per head.

    Parameters
    ----------
    mask
        A BlockMask; with `with_pairs` one that flexmask made.
    head, batch_index
        Which head and which prompt of the batch; 0 where all share.
    with_pairs
        Add the pairs that are seen inside each block, by the mask_mod: causality, windows and padding. 16 KB per block of 128.

    Returns
    -------
    BsrBlocks
        On the mask's device. FlashInfer's ``causal=True`` is right inside the block that cuts the diagonal, the last of its row,
        if row 0 is at a multiple of the block size, as in whole prompts.

    Raises
    ------
    NotImplementedError, TypeError, ValueError
        With `with_pairs`, for masks that flexmask did not make; for anything but a BlockMask; for a head or prompt that it lacks.

    Examples
    --------
    >>> import torch
    >>> from flexmask.block_masks import causal_mask
    >>> query = torch.randn(1, 1, 64, 16)
    >>> blocks = to_bsr(causal_mask(query, query, block_size=32))
    >>> blocks.indptr, blocks.indices
    (tensor([0, 1, 3], dtype=torch.int32), tensor([0, 0, 1], dtype=torch.int32))
    """
    kept, _ = blocks_of(mask)
    _check_index("batch_index", batch_index, kept.shape[0])
    _check_index("head", head, kept.shape[1])
    if mask.BLOCK_SIZE[0] != mask.BLOCK_SIZE[1]:
        raise ValueError(f"mask must have square blocks; got {mask.BLOCK_SIZE}")
    if with_pairs:
        q_len, kv_len = require_parts(mask, "with_pairs").lengths
    kept, size = kept[batch_index, head], mask.BLOCK_SIZE[0]
    counts = kept.sum(-1, dtype=torch.int32)
    indptr = torch.nn.functional.pad(counts.cumsum(0, dtype=torch.int32), (1, 0))
    q_block, kv_block = kept.nonzero(as_tuple=True)
    pairs = None
    if with_pairs:
        position = torch.arange(size, device=kept.device)  # inside a block
        q_idx = (q_block[:, None] * size + position)[:, :, None].expand(-1, -1, size)
        kv_idx = (kv_block[:, None] * size + position)[:, None, :].expand(-1, size, -1)
        exists = (q_idx < q_len) & (kv_idx < kv_len)
        # a mask_mod cannot be called for rows and keys past the end
        indices = (torch.where(exists, q_idx, 0), torch.where(exists, kv_idx, 0))
        prompt, head_index = (torch.full_like(q_idx, number) for number in (batch_index, head))
        pairs = mask.mask_mod(prompt, head_index, *indices) & exists
    return BsrBlocks(indptr, kv_block.to(torch.int32), pairs, (kept.shape[0] * size, kept.shape[1] * size), size)


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
    >>> query = torch.randn(1, 1, 64, 16)
    >>> blocks = to_flash_attn(causal_mask(query, query, block_size=32))
    >>> blocks.mask_block_idx[0, 0, :, 0], blocks.full_block_cnt[0, 0]
    (tensor([0, 1], dtype=torch.int32), tensor([0, 1], dtype=torch.int32))
    """
    kept, full = blocks_of(mask)
    rows, columns = mask.BLOCK_SIZE
    tile = columns if kv_tile is None else plain_number(kv_tile)
    check_count("kv_tile", tile, 1, "keys")
    if columns % tile:
        raise ValueError(f"kv_tile must divide the mask's block size {columns}; got {kv_tile!r}")
    if tile != columns:
        # the last block may hold fewer tiles
        num_tiles = num_kv_blocks(mask, tile)
        kept, full = (x.repeat_interleave(columns // tile, -1)[..., :num_tiles] for x in (kept, full))
    return FlashBlocks(*ascending_indices(kept & ~full), *ascending_indices(full), (rows, tile))


class FlashInferBlocks(NamedTuple):
    """The first arguments of ``plan``, in its order, and ``causal``, which must be passed as True."""

    block_mask_map: Tensor  # (num_kv_heads, num_q_blocks, columns) bool
    block_row_sz: Tensor  # (num_kv_heads, num_q_blocks) int32, rows per query block
    block_col_sz: Tensor  # (num_kv_heads, columns) int32, keys per column
    causal: bool


def to_flashinfer(
    mask: BlockMask, num_kv_heads: int, *, batch_index: int | None = None, merge_heads: bool = False
) -> FlashInferBlocks:
    """Blocks for FlashInfer's variable block-sparse prefill, whose kernel applies causality inside a block and nothing else.

    ``causal=True`` lets row t of r rows see all but the last ``r - 1 - t`` of the keys that its block keeps. That is causality
    inside the diagonal block iff these end with the block's own positions. So columns end where query blocks end: a chunk that
    does not begin at a key block cuts key blocks in two, and a query block keeps the parts that some of its rows see.

    FlashInfer keeps one pattern for all query heads of a KV head, and one prompt. Reads the chunk's offset and the diagonals.

    Parameters
    ----------
    mask
        A BlockMask as flexmask's methods and `from_block_map` give it, unchanged.
    num_kv_heads
        Heads of key and value. A mask of one head holds for all.
    batch_index
        Which prompt of the batch; may be left out if the mask has only one.
    merge_heads
        Keep, for all query heads of a KV head, the blocks that one of them keeps: more is computed, nothing is lost. Otherwise
        repeat key and value for every query head and pass their number as `num_kv_heads`.

    Returns
    -------
    FlashInferBlocks
        On the mask's device. Rows and columns ascend; a column that ends a key block early is followed by the rest of it.

    Raises
    ------
    NotImplementedError, TypeError, ValueError
        For windows, padding and own mask_mods, which the kernel would ignore, and for masks that flexmask did not make; for other
        arguments than those above; for a row of blocks that keeps other blocks but not its diagonal.

    Examples
    --------
    >>> import torch
    >>> from flexmask.block_masks import causal_mask
    >>> query, key = torch.randn(1, 1, 32, 16), torch.randn(1, 1, 80, 16)
    >>> blocks = to_flashinfer(causal_mask(query, key, block_size=32), num_kv_heads=1)
    >>> blocks.block_mask_map.int(), blocks.block_row_sz.tolist(), blocks.block_col_sz.tolist()
    (tensor([[[1, 1, 1, 1]]], dtype=torch.int32), [[32]], [[32, 16, 16, 16]])
    """
    kept, target = blocks_of(mask)[0], "FlashInfer's variable block-sparse attention"
    selection, (q_len, kv_len), window, attention_mask, offsets = require_parts(mask, target)
    for name, restriction in (("window", window), ("padding", attention_mask), ("mask_mod", selection.mask_mod)):
        if restriction is not None:
            raise NotImplementedError(f"{target} knows causality only inside a block; the mask has {name}")
    if batch_index is None and kept.shape[0] != 1:
        question = f"which of the mask's {kept.shape[0]} prompts to plan"
        raise ValueError(f"batch_index must say {question}: FlashInfer plans one; got None")
    batch_index = 0 if batch_index is None else batch_index
    _check_index("batch_index", batch_index, kept.shape[0])
    kept = _by_kv_head(kept[batch_index], num_kv_heads, merge_heads)
    size, device, offset = selection.block_size, kept.device, 0 if offsets is None else int(offsets[batch_index])

    # computed on the host, whatever the default device is
    first_rows = offset + torch.arange(kept.shape[1], device="cpu") * size
    ends = (first_rows + size).clamp(max=offset + q_len)
    starts = torch.cat([torch.arange(0, kv_len, size, device="cpu"), first_rows, ends])
    starts = starts[starts < kv_len].unique()
    sizes = torch.diff(starts, append=torch.tensor([kv_len], device="cpu"))
    by_column = kept[:, :, (starts // size).to(device)]
    is_seen = (starts < ends[:, None]).to(device)
    block_map = by_column & is_seen

    is_diagonal = is_seen & (starts >= first_rows[:, None]).to(device)
    lacks_diagonal = block_map.any(-1) & (is_diagonal & ~block_map).any(-1)
    if bool(lacks_diagonal.any()):
        head, block = lacks_diagonal.nonzero()[0].tolist()
        raise ValueError(
            f"mask must keep the diagonal of every query block that keeps anything; block {block} of head {head} does not"
        )
    sizes, rows = (x.to(device, torch.int32).expand(num_kv_heads, -1).contiguous() for x in (sizes, ends - first_rows))
    return FlashInferBlocks(block_map.contiguous(), rows, sizes, True)


def _check_index(name: str, value: int, length: int) -> None:
    check_int(name, value)
    if not 0 <= value < length:
        raise ValueError(f"{name} must be from 0 to {length - 1}; got {value}")


def _by_kv_head(kept: Tensor, num_kv_heads: int, merge_heads: bool) -> Tensor:
    heads = kept.shape[0]
    check_count("num_kv_heads", num_kv_heads, 1, "heads")
    if heads in (1, num_kv_heads):
        return kept.expand(num_kv_heads, -1, -1)
    if heads % num_kv_heads:
        raise ValueError(f"num_kv_heads must divide the mask's {heads} heads; got {num_kv_heads}")
    if not merge_heads:
        raise ValueError(
            f"FlashInfer keeps one pattern per KV head, and the mask has {heads} heads for {num_kv_heads}: pass "
            "merge_heads=True, or repeat key and value for every query head"
        )
    return kept.unflatten(0, (num_kv_heads, -1)).any(1)
