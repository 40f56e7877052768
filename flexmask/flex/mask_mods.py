"""mask_mods of flexmask's masks, for FlexAttention's ``mask_mod(b, h, q_idx, kv_idx)``."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from flexmask._torch import captured, captured_number, named
from flexmask.base.inputs import AttentionInputs

MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def visible_mask_mod(inputs: AttentionInputs) -> MaskMod:
    """The mask_mod of visibility, of a placed problem: causality from the row's position, padding and window."""
    window, token = inputs.window, inputs.attention_mask
    name = f"visible(window={window}, padded={token is not None}, shifted={inputs.offset is not None})"
    offset = None if inputs.offset is None else captured(inputs.offset)
    valid = None if token is None else captured(token)
    reach = None if window is None else captured_number(window, inputs.key.shape[0], inputs.key.device)

    def visible(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        position = q_idx if offset is None else q_idx + offset[b]
        mask = kv_idx <= position
        if reach is not None:
            mask = mask & (position - kv_idx < reach[b])
        if valid is not None:
            mask = mask & valid[b, kv_idx] & valid[b, position]
        return mask

    return named(visible, name)


def kept_mask_mod(visible: MaskMod, keep: Tensor, block_size: int) -> MaskMod:
    """`visible`, limited to kept blocks, so that the mask says the same with and without its block lists.

    `keep` is (batch, num_heads or 1, num_q_blocks, num_kv_blocks) bool.
    """
    shared = keep.shape[1] == 1
    # a dimension less: torch 2.5 reads a number among the indices of a mask_mod on the host, which fails there
    keep = captured(keep.squeeze(1) if shared else keep)
    side = captured_number(block_size, keep.shape[0], keep.device)

    def kept(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        q_block, kv_block = q_idx // side[b], kv_idx // side[b]
        own = keep[b, q_block, kv_block] if shared else keep[b, h, q_block, kv_block]
        return own & visible(b, h, q_idx, kv_idx)

    return named(kept, f"kept and {visible.__name__}")
