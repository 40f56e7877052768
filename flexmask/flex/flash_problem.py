"""Kinds of FLASH calls, and of each a problem whose dropped blocks hold large scores, solved in float64."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from flexmask.base.inputs import AttentionInputs, PositionedInputs
from flexmask.base.scores import capped
from flexmask.base.selection import Selection, block_lists
from flexmask.base.visibility import block_visibility, visible_keys
from flexmask.flex.block_mask import block_mask


class FlashCall(NamedTuple):
    """A kind of call, all of which share a verdict."""

    dtype: torch.dtype
    head_dim: int
    v_head_dim: int
    block_size: int = 128
    softcap: bool = False
    captures: bool = False  # a window, or an offset of row 0; called directly, a window
    padded: bool = False
    shared: bool = False  # one list of blocks for all heads
    gradients: bool = False
    per_key: int = 2  # query heads per key head: FLASH packs those that share a list into a tile
    direct: bool = False  # by `flash_attention`, else through FlexAttention

    @staticmethod
    def of(inputs: AttentionInputs, block_size: int, shared: bool, direct: bool = False) -> FlashCall:
        query, value = inputs.query, inputs.value
        assert value is not None
        captures = inputs.window is not None or (inputs.offset is not None and not direct)
        # not an expression: torch.compile would keep it symbolic
        if not direct and query.shape[2] != inputs.key.shape[2]:
            captures = True
        has_softcap, is_padded = inputs.softcap is not None, inputs.attention_mask is not None
        sizes = (query.shape[3], value.shape[3], block_size)
        per_key = query.shape[1] // inputs.key.shape[1]
        return FlashCall(query.dtype, *sizes, has_softcap, captures, is_padded, shared, inputs.needs_grad, per_key, direct)

    def __str__(self) -> str:
        sizes = f"head_dim {self.head_dim}" if self.head_dim == self.v_head_dim else f"head_dim {self.head_dim}/{self.v_head_dim}"
        named = {
            "soft cap": self.softcap,
            "window": self.captures and self.direct,
            "window and offset": self.captures and not self.direct,
            "padding": self.padded,
            "one list for all heads": self.shared,
            "gradients": self.gradients,
            "called directly": self.direct,
        }
        heads = f"{self.per_key} query head{'s' if self.per_key > 1 else ''} per key head"
        parts = [str(self.dtype).removeprefix("torch."), sizes, heads, f"blocks of {self.block_size}"]
        return ", ".join(parts + [name for name, is_on in named.items() if is_on])


_SOFTCAP = 5.0


def flash_problem(call: FlashCall, device: torch.device) -> tuple[PositionedInputs, BlockMask, Tensor, Tensor]:
    """Inputs of a kind of call, of eight blocks of keys and a part of one, and their mask.

    Also its pairs without and with the lists, (batch, 1, q_len, kv_len) and (batch, num_heads or 1, q_len, kv_len) bool.
    """
    size, with_gradients = call.block_size, call.gradients
    kv_len = 8 * size + 44
    window = 4 * size + 30 if call.captures else None
    # one kernel of direct calls serves every offset
    offset = 3 * size + 20 if call.captures or call.direct else 0
    batch, q_len = 2 if call.padded else 1, kv_len - offset
    token = None
    if call.padded:
        token = torch.ones(batch, kv_len, dtype=torch.bool, device=device)
        # no token of the first query block, and a part of the last block's
        token[0, : offset + size + 9] = False
        token[1, kv_len - 11 :] = False
    dtype, kv_heads = call.dtype, 2 if call.per_key <= 16 else 1  # memory
    heads = kv_heads * call.per_key
    query = 3 * normal_numbers((batch, heads, q_len, call.head_dim), 0, dtype, device)
    key = normal_numbers((batch, kv_heads, kv_len, call.head_dim), 1, dtype, device)
    value = normal_numbers((batch, kv_heads, kv_len, call.v_head_dim), 2, dtype, device)
    for tensor in (query, key, value):
        tensor.requires_grad_(with_gradients)
    scale, softcap = call.head_dim**-0.5, _SOFTCAP if call.softcap else None
    inputs = AttentionInputs(query, key, value, scale, softcap, window, token, needs_grad=with_gradients).with_offset()

    tokens = inputs.tokens()
    visibility = block_visibility(tokens, size, window)
    keep = _kept(visibility.visible.shape, 1 if call.shared else heads, offset // size, device)
    mask = block_mask(inputs, Selection(block_lists(keep & visibility.visible[:, None], visibility.full), None, {}, size))
    visible = visible_keys(tokens.position, tokens.row_valid, tokens, window)[:, None]
    in_kept = keep.repeat_interleave(size, 2)[:, :, :q_len].repeat_interleave(size, 3)[..., :kv_len]
    return inputs, mask, visible, in_kept & visible


def exact_attention(inputs: AttentionInputs, pairs: Tensor) -> tuple[Tensor, Tensor]:
    """Attention to `pairs` in float64 and its log-sum-exp; rows that see nothing give 0 and -inf."""
    assert inputs.value is not None
    query = inputs.query.double()
    key, value = (x.double().repeat_interleave(query.shape[1] // inputs.key.shape[1], 1) for x in (inputs.key, inputs.value))
    scores = capped(query @ key.mT * inputs.scale, inputs.softcap).masked_fill(~pairs, -math.inf)
    lse = scores.logsumexp(-1)
    sees = pairs.any(-1, keepdim=True)
    return torch.where(sees, (scores - torch.where(sees, lse.unsqueeze(-1), 0.0)).exp(), 0.0) @ value, lse


def normal_numbers(shape: tuple[int, ...], seed: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Normal numbers from a generator of their own."""
    generator = torch.Generator("cpu").manual_seed(seed)
    return torch.randn(shape, dtype=torch.float32, device="cpu", generator=generator).to(device, dtype)


def _kept(shape: torch.Size, heads: int, first: int, device: torch.device) -> Tensor:
    """Half of the blocks, the one before each row's own, and every other diagonal one; `first` is the first row's key block."""
    batch, rows, columns = shape
    sizes = (torch.arange(n, device=device) for n in (batch, heads, rows, columns))
    b, h, i, j = torch.meshgrid(*sizes, indexing="ij")
    own = i + first
    return ((3 * i + 5 * j + h + b) % 4 < 2) & (j != own) | (j == own - 1) | ((j == own) & (i % 2 == 0))
