"""A BlockMask as maps and numbers."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from flexmask._torch import KNOWS_LENGTHS
from flexmask.base.checks import check_int
from flexmask.base.selection import listed_blocks
from flexmask.flex.block_mask import parts_of


class Geometry(NamedTuple):
    """Positions of a flexmask mask's rows, and the rules that hide pairs in addition to causality."""

    lengths: tuple[int, int]
    block_size: int
    offset: Tensor | None  # (batch,) int32: position of row 0; None: 0
    hidden_by: tuple[str, ...]  # of "window", "padding", "mask_mod"


def checked(mask: object) -> BlockMask:
    if not isinstance(mask, BlockMask):
        raise TypeError(f"mask must be a BlockMask; got {type(mask).__name__}")
    return mask


def check_index(name: str, value: int, length: int) -> None:
    check_int(name, value)
    if not 0 <= value < length:
        raise ValueError(f"{name} must be from 0 to {length - 1}; got {value}")


def kept_and_full(mask: BlockMask) -> tuple[Tensor, Tensor]:
    """Listed blocks and the full ones among them, (batch, num_heads, num_q_blocks, num_kv_blocks) bool."""
    checked(mask)
    columns = num_kv_blocks(mask)
    partial = listed_blocks(mask.kv_num_blocks, mask.kv_indices, columns)
    if mask.full_kv_num_blocks is None:
        return partial, torch.zeros_like(partial)
    assert mask.full_kv_indices is not None
    full = listed_blocks(mask.full_kv_num_blocks, mask.full_kv_indices, columns)
    return partial | full, full


def num_kv_blocks(mask: BlockMask, tile: int | None = None) -> int:
    """Key blocks, or tiles, that hold a key; another's index lists may be shorter or longer."""
    size = mask.BLOCK_SIZE[1]
    parts = parts_of(mask)
    if KNOWS_LENGTHS:
        kv_len = mask.seq_lengths[1]
    else:
        kv_len = mask.kv_indices.shape[-1] * size if parts is None else parts[1][1]
    return -(-kv_len // (size if tile is None else tile))


def geometry(mask: BlockMask, target: str) -> Geometry:
    """The geometry of a mask that flexmask made; from another's mask_mod it cannot be read."""
    parts = parts_of(checked(mask))
    if parts is None:
        raise NotImplementedError(
            f"{target} needs a mask as a flexmask method or from_block_map gives it, unchanged: what another mask_mod hides is "
            "unknown"
        )
    selected, lengths, window, attention_mask, offset = parts
    hidden = {"window": window, "padding": attention_mask, "mask_mod": selected.mask_mod}
    return Geometry(lengths, selected.block_size, offset, tuple(name for name, value in hidden.items() if value is not None))
