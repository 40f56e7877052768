"""mask_mods of flexmask's masks, for FlexAttention's ``mask_mod(b, h, q_idx, kv_idx)``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from flexmask._torch import CPU_TAKES_UNBACKED_SIZES, RELEASE, is_traced
from flexmask.base.inputs import AttentionInputs

MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
_Function = TypeVar("_Function", bound=Callable[..., Any])


def visible_mask_mod(inputs: AttentionInputs) -> MaskMod:
    """The mask_mod of inputs `with_offset`: causality, padding and window.

    Attention is compiled once per ``__name__``, which names kinds of inputs and no values.
    """
    window, token = inputs.window, inputs.attention_mask
    name = f"visible(window={window is not None}, padded={token is not None}, shifted={inputs.offset is not None})"
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


def limited_mask_mod(visible: MaskMod, own: MaskMod, name: str) -> MaskMod:
    """`visible`, limited to what a user's mask_mod of that name allows."""

    def limited(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return own(b, h, q_idx, kv_idx) & visible(b, h, q_idx, kv_idx)

    return named(limited, f"{name} and {visible.__name__}")


def kept_mask_mod(visible: MaskMod, keep: Tensor, block_size: int) -> MaskMod:
    """`visible`, limited to the blocks of `keep`, (batch, num_heads or 1, num_q_blocks, num_kv_blocks) bool."""
    shared = keep.shape[1] == 1
    # torch 2.5 reads a number among a mask_mod's indices on the host, which fails
    keep = captured(keep.squeeze(1) if shared else keep)
    side = captured_number(block_size, keep.shape[0], keep.device)

    def kept(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        q_block, kv_block = q_idx // side[b], kv_idx // side[b]
        own = keep[b, q_block, kv_block] if shared else keep[b, h, q_block, kv_block]
        return own & visible(b, h, q_idx, kv_idx)

    return named(kept, f"kept and {visible.__name__}")


def captured(tensor: Tensor) -> Tensor:
    """`tensor` in a form that a mask_mod may capture: itself on accelerators, one that torch can compile on CPUs.

    FlexAttention's C++ template (2.8.0, 2.13.0) replaces ``ks1`` by ``cur_qSplitSize`` in generated code, hence the symbolic size
    ``ks12`` by the undeclared ``cur_qSplitSize2``. Unbacked sizes are named ``ku0`` and stay. A size of 1 is never symbolic.

    In a surrounding compilation nothing can be marked, and symbolic sizes may still fail. There as_strided puts captured tensors
    into memory, and indexing with a range keeps Inductor from treating a constant as such.
    """
    if tensor.device.type != "cpu":
        return tensor
    if is_traced():
        in_passing = tensor[torch.arange(tensor.shape[0], device=tensor.device)]
        return in_passing.as_strided(in_passing.shape, in_passing.stride())
    view = tensor.detach()
    if CPU_TAKES_UNBACKED_SIZES:
        for dim, size in enumerate(view.shape):
            if size > 1:
                torch._dynamo.decorators.mark_unbacked(view, dim)
    return view


def captured_number(number: int, batch: int, device: torch.device) -> Tensor:
    """`number` in a form that a mask_mod may capture: (batch,) int32, read at the batch index, clamped to int32.

    A Python int that changes becomes symbolic, which the FLASH backend (2.11) rejects and the CPU's template misnames.
    """
    return captured(torch.full((batch,), min(number, 2**31 - 1), dtype=torch.int32, device=device))


def named(function: _Function, name: str) -> _Function:
    """`function` with another ``__name__``; in a surrounding compilation only where torch traces that (2.8.0 does, 2.5.1 not)."""
    if RELEASE >= (2, 8) or not is_traced():
        function.__name__ = name
    return function
