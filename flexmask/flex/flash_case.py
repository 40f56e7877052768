"""Kinds of FLASH calls, and for each a problem whose dropped blocks hold large scores, solved in float64."""

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


class FlashKind(NamedTuple):
    """A kind of call; calls of one kind share a verdict."""

    dtype: torch.dtype
    head_dim: int
    v_head_dim: int
    block_size: int = 128
    has_softcap: bool = False
    has_window_or_offset: bool = False  # a window, or an offset of row 0; called directly, a window
    has_padding: bool = False
    shares_lists: bool = False  # one list of blocks for all heads
    needs_grad: bool = False
    queries_per_kv: int = 2  # query heads per KV head: FLASH packs those that share a list into a tile
    is_direct: bool = False  # by `flash_attention`, else through FlexAttention

    @staticmethod
    def of(inputs: AttentionInputs, block_size: int, shares_lists: bool, is_direct: bool = False) -> FlashKind:
        query, value = inputs.query, inputs.value
        assert value is not None
        has_window_or_offset = inputs.window is not None or (inputs.offset is not None and not is_direct)
        # not an expression: torch.compile would keep it symbolic
        if not is_direct and query.shape[2] != inputs.key.shape[2]:
            has_window_or_offset = True
        has_softcap, has_padding = inputs.softcap is not None, inputs.attention_mask is not None
        features = (has_softcap, has_window_or_offset, has_padding, shares_lists, inputs.needs_grad)
        queries_per_kv = query.shape[1] // inputs.key.shape[1]
        return FlashKind(query.dtype, query.shape[3], value.shape[3], block_size, *features, queries_per_kv, is_direct)

    def __str__(self) -> str:
        given = {name: value for name, value in self._asdict().items() if value != self._field_defaults.get(name)}
        return ", ".join(f"{name}={value}" for name, value in given.items())


def flash_case(kind: FlashKind, device: torch.device) -> tuple[PositionedInputs, BlockMask, Tensor, Tensor]:
    """Inputs of a kind of call with eight blocks of keys and a part of one, and their mask.

    Also the visible pairs, (batch, 1, q_len, kv_len) bool, and those in listed blocks, (batch, num_heads or 1, q_len, kv_len).
    """
    size, with_gradients = kind.block_size, kind.needs_grad
    kv_len = 8 * size + 44
    window = 4 * size + 30 if kind.has_window_or_offset else None
    # one kernel of direct calls serves every offset
    offset = 3 * size + 20 if kind.has_window_or_offset or kind.is_direct else 0
    batch, q_len = 2 if kind.has_padding else 1, kv_len - offset
    padding_mask = None
    if kind.has_padding:
        padding_mask = torch.ones(batch, kv_len, dtype=torch.bool, device=device)
        # no token of the first query block, and a part of the last block's
        padding_mask[0, : offset + size + 9] = False
        padding_mask[1, kv_len - 11 :] = False
    dtype, kv_heads = kind.dtype, 2 if kind.queries_per_kv <= 16 else 1  # memory
    heads = kv_heads * kind.queries_per_kv
    query = 3 * normal_numbers((batch, heads, q_len, kind.head_dim), 0, dtype, device)
    key = normal_numbers((batch, kv_heads, kv_len, kind.head_dim), 1, dtype, device)
    value = normal_numbers((batch, kv_heads, kv_len, kind.v_head_dim), 2, dtype, device)
    for tensor in (query, key, value):
        tensor.requires_grad_(with_gradients)
    scale, softcap = kind.head_dim**-0.5, 5.0 if kind.has_softcap else None
    inputs = AttentionInputs(query, key, value, scale, softcap, window, padding_mask, needs_grad=with_gradients).with_offset()

    tokens = inputs.tokens()
    visibility = block_visibility(tokens, size, window)
    keep = _kept(visibility.visible.shape, 1 if kind.shares_lists else heads, offset // size, device)
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
    """Half of the blocks, each block before the diagonal, every other one on it; `first` is the first row's key block."""
    batch, rows, columns = shape
    sizes = (torch.arange(n, device=device) for n in (batch, heads, rows, columns))
    b, h, i, j = torch.meshgrid(*sizes, indexing="ij")
    diagonal = i + first
    return ((3 * i + 5 * j + h + b) % 4 < 2) & (j != diagonal) | (j == diagonal - 1) | ((j == diagonal) & (i % 2 == 0))
