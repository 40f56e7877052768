"""The kinds of call that FLASH's numeric check tells apart."""

from __future__ import annotations

from typing import NamedTuple

import torch

from flexmask.base.inputs import AttentionInputs


class FlashCall(NamedTuple):
    """A kind of call, all of which share a verdict."""

    dtype: torch.dtype
    head_dim: int
    v_head_dim: int
    block_size: int = 128
    softcap: bool = False
    captures: bool = False  # a window, or an offset of row 0
    padded: bool = False
    shared: bool = False  # one list of blocks for all heads
    gradients: bool = False

    @staticmethod
    def of(inputs: AttentionInputs, block_size: int, shared: bool) -> FlashCall:
        query, value = inputs.query, inputs.value
        assert value is not None
        captures = inputs.window is not None or inputs.offset is not None
        # not an expression: torch.compile would keep it symbolic
        if query.shape[2] != inputs.key.shape[2]:
            captures = True
        has_softcap, is_padded = inputs.softcap is not None, inputs.attention_mask is not None
        sizes = (query.shape[3], value.shape[3], block_size)
        return FlashCall(query.dtype, *sizes, has_softcap, captures, is_padded, shared, inputs.needs_grad)

    def __str__(self) -> str:
        sizes = f"head_dim {self.head_dim}" if self.head_dim == self.v_head_dim else f"head_dim {self.head_dim}/{self.v_head_dim}"
        named = {
            "soft cap": self.softcap,
            "window and offset": self.captures,
            "padding": self.padded,
            "one list for all heads": self.shared,
            "gradients": self.gradients,
        }
        parts = [str(self.dtype).removeprefix("torch."), sizes, f"blocks of {self.block_size}"]
        return ", ".join(parts + [name for name, is_on in named.items() if is_on])
