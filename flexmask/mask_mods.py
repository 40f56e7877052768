"""mask_mods of the masks that flexmask emits, for FlexAttention's ``mask_mod(b, h, q_idx, kv_idx)``."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from flexmask._torch import captured, captured_int, named

MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def visible_mask_mod(offset: Tensor | None, valid: Tensor | None, window: int | None, device: torch.device) -> MaskMod:
    """Which keys a row sees: causality from its position, padding and window.

    Parameters
    ----------
    offset
        (batch,) int32 position of query row 0, or None where it is 0 in every batch row.
    valid
        (batch, kv_len) bool, True = token, or None where every key is one.
    window
        Tokens, the row's own position counted, or None.
    device
        Of the queries and keys.
    """
    name = f"visible(window={window}, padded={valid is not None}, shifted={offset is not None})"
    offset = None if offset is None else captured(offset)
    valid = None if valid is None else captured(valid)
    reach = None if window is None else captured_int(window, device)

    def visible(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        position = q_idx if offset is None else q_idx + offset[b]
        mask = kv_idx <= position
        if reach is not None:
            mask = mask & (position - kv_idx < reach)
        if valid is not None:
            mask = mask & valid[b, kv_idx] & valid[b, position]
        return mask

    return named(visible, name)


def kept_mask_mod(visible: MaskMod, keep: Tensor, block_size: int, name: str) -> MaskMod:
    """`visible`, limited to kept blocks, so that the mask says the same with and without its block lists.

    `keep` is (batch, num_heads, num_q_blocks, num_kv_blocks) bool; `name` titles the closure.
    """
    keep = captured(keep)
    side = captured_int(block_size, keep.device)

    def kept(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return keep[b, h, q_idx // side, kv_idx // side] & visible(b, h, q_idx, kv_idx)

    return named(kept, name)
