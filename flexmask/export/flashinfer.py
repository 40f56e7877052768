"""The arguments of FlashInfer's ``VariableBlockSparseAttentionWrapper.plan``."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from flexmask.base.options import check_count
from flexmask.export.index_lists import check_index, geometry, kept_and_full


class FlashInferBlocks(NamedTuple):
    """The first arguments of ``plan``, in its order, and ``causal``, which must be passed as True."""

    block_mask_map: Tensor  # (num_kv_heads, num_q_blocks, columns) bool
    block_row_sz: Tensor  # (num_kv_heads, num_q_blocks) int32, rows per query block
    block_col_sz: Tensor  # (num_kv_heads, columns) int32, keys per column
    causal: bool


def to_flashinfer(mask: BlockMask, num_kv_heads: int, *, row: int | None = None, merge_heads: bool = False) -> FlashInferBlocks:
    """Blocks for FlashInfer's variable block-sparse prefill, whose kernel applies causality inside a block and nothing else.

    ``causal=True`` lets row t of r rows see all but the last ``r - 1 - t`` of the keys that its block keeps. That is causality
    inside the diagonal block iff these end with the block's own positions. So columns end where query blocks end: a chunk that
    does not begin at a key block cuts key blocks in two, and a query block keeps the parts that some of its rows see.

    FlashInfer keeps one pattern for all query heads of a key head, and one prompt. Reads the chunk's offset and the diagonals.

    Parameters
    ----------
    mask
        A BlockMask as flexmask's methods and `from_block_map` give it, unchanged.
    num_kv_heads
        Heads of key and value. A mask of fewer heads, 1, serves all.
    row
        Row of the batch; may be left out where the mask has one.
    merge_heads
        Keep, for all query heads of a key head, the blocks that one of them keeps: more is computed, nothing is lost. Without,
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
    >>> from flexmask.export import to_flashinfer
    >>> query, key = torch.randn(1, 1, 32, 16), torch.randn(1, 1, 80, 16)
    >>> blocks = to_flashinfer(causal_mask(query, key, block_size=32), num_kv_heads=1)
    >>> blocks.block_mask_map.int(), blocks.block_row_sz.tolist(), blocks.block_col_sz.tolist()
    (tensor([[[1, 1, 1, 1]]], dtype=torch.int32), [[32]], [[32, 16, 16, 16]])
    """
    where = geometry(mask, "FlashInfer's variable block-sparse attention")
    if where.hidden_by:
        raise NotImplementedError(
            f"FlashInfer's variable block-sparse attention knows causality only inside a block; the mask has {where.hidden_by[0]}"
        )
    kept = kept_and_full(mask)[0]
    if row is None and kept.shape[0] != 1:
        raise ValueError(f"row must say which of the mask's {kept.shape[0]} prompts to plan: FlashInfer plans one; got None")
    row = 0 if row is None else row
    check_index("row", row, kept.shape[0])
    kept = _by_key_head(kept[row], num_kv_heads, merge_heads)
    (q_len, kv_len), size = where.lengths, where.block_size
    offset = 0 if where.offset is None else int(where.offset[row])
    device = kept.device

    first_rows = offset + torch.arange(kept.shape[1]) * size
    ends = (first_rows + size).clamp(max=offset + q_len)
    starts = torch.cat([torch.arange(0, kv_len, size), first_rows, ends])
    starts = starts[starts < kv_len].unique()
    sizes = torch.diff(starts, append=torch.tensor([kv_len]))
    by_column = kept[:, :, (starts // size).to(device)]
    seen = (starts < ends[:, None]).to(device)
    block_map = by_column & seen

    diagonal = seen & (starts >= first_rows[:, None]).to(device)
    lost = block_map.any(-1) & (diagonal & ~block_map).any(-1)
    if bool(lost.any()):
        head, block = lost.nonzero()[0].tolist()
        raise ValueError(
            f"mask must keep the diagonal of every query block that keeps anything; block {block} of head {head} does not"
        )
    sizes, rows = (x.to(device, torch.int32).expand(num_kv_heads, -1).contiguous() for x in (sizes, ends - first_rows))
    return FlashInferBlocks(block_map.contiguous(), rows, sizes, True)


def _by_key_head(kept: Tensor, num_kv_heads: int, merge_heads: bool) -> Tensor:
    heads = kept.shape[0]
    check_count("num_kv_heads", num_kv_heads, 1, "heads")
    if heads in (1, num_kv_heads):
        return kept.expand(num_kv_heads, -1, -1)
    if heads % num_kv_heads:
        raise ValueError(f"num_kv_heads must divide the mask's {heads} heads; got {num_kv_heads}")
    if not merge_heads:
        raise ValueError(
            f"FlashInfer keeps one pattern per key head, and the mask has {heads} heads for {num_kv_heads}: pass "
            "merge_heads=True, or repeat key and value for every query head"
        )
    return kept.unflatten(0, (num_kv_heads, -1)).any(1)
