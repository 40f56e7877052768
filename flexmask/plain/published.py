"""The block sets of the authors' published code, for parity (``method="published"``).

Source: github.com/bytedance/FlexPrefill, described in our own words by what it keeps. It differs from the default selection:

- budgets count sorted *tokens* and become blocks by ``// 128 + 1``, whatever the block size;
- a slash counts only for the block diagonal of its offset's block;
- a probability that underflows to 0 makes the distance NaN, hence the head vertical-slash;
- a query-aware head keeps the flattened blocks whose running sum stays at or under gamma, without the one that crosses;
- pooled scores have no term for short blocks.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from flexmask.base.running_sums import running_sums
from flexmask.plain.top_p import ranks


class PublishedSelection(NamedTuple):
    """The published code's selection for each head, before the blocks that every row keeps."""

    vertical: Tensor  # (batch, num_heads, num_blocks) bool
    slash: Tensor  # the same shape
    query_aware: Tensor  # (batch, num_heads, num_blocks, num_blocks) bool
    is_query_aware: Tensor  # (batch, num_heads)
    distance: Tensor
    num_vertical: Tensor
    num_slash: Tensor


def published_selection(
    attention: Tensor, estimated: Tensor, pooled: Tensor, shares: tuple[Tensor, Tensor | float], budget: tuple[int, int | None]
) -> PublishedSelection:
    """Select as the published code does.

    `attention`, (batch, num_heads, block_size, kv_len) float32, is that of the last rows; `estimated`, (batch, num_heads,
    num_blocks), that of the pooled last block, `pooled` of all pooled blocks. `shares` are gamma, (num_heads,), and tau, 0-d or
    the number 0; `budget` floor and cap of the two counts, in blocks.
    """
    gamma, tau = shares
    min_blocks, max_blocks = budget
    blocks, block_size = estimated.shape[-1], attention.shape[2]
    vertical_tokens = attention.mean(2)
    slash_tokens = _by_offset(attention)
    vertical = vertical_tokens.unflatten(-1, (blocks, block_size)).sum(-1)
    slash = slash_tokens.unflatten(-1, (blocks, block_size)).sum(-1)
    distance = _distance_with_nan(estimated, vertical)
    is_query_aware = distance < tau

    highest = blocks if max_blocks is None else min(max_blocks, blocks)
    num_vertical = _budget(vertical_tokens, gamma).clamp(min=min_blocks).clamp(max=highest)
    num_slash = _budget(slash_tokens, gamma).clamp(min=min_blocks).clamp(max=highest)
    floor = min(min_blocks, highest)
    num_vertical = torch.where(is_query_aware, floor, num_vertical)
    num_slash = torch.where(is_query_aware, floor, num_slash)

    flat = pooled.flatten(2)
    ordered, order = flat.sort(dim=-1, descending=True, stable=True)
    share = gamma.unsqueeze(-1)
    # scatter before comparing: Inductor 2.11 cannot fuse the comparison into a long running sum
    sums = running_sums(ordered, gamma.dtype)
    sums = torch.zeros_like(sums).scatter(-1, order, sums)
    # at gamma 1 rounding must not decide
    query_aware = ((sums <= share * blocks) | (share >= 1)).unflatten(-1, (blocks, blocks))
    return PublishedSelection(
        _top(vertical, num_vertical),
        _top(slash, num_slash),
        query_aware & is_query_aware[..., None, None],
        is_query_aware,
        distance,
        num_vertical,
        num_slash,
    )


def _by_offset(attention: Tensor) -> Tensor:
    """Mean over the last rows of a whole prompt, by offset ``position - k``: (batch, num_heads, kv_len)."""
    rows, kv_len = attention.shape[2:]
    position = kv_len - rows + torch.arange(rows, device=attention.device)
    key = position.unsqueeze(-1) - torch.arange(kv_len, device=attention.device)
    shifted = attention.gather(-1, key.clamp(min=0).expand(attention.shape))
    return torch.where(key >= 0, shifted, 0.0).mean(2)


def _budget(tokens: Tensor, gamma: Tensor) -> Tensor:
    """Blocks by the published rule: tokens whose running sum stays at or under gamma, plus one, ``// 128 + 1``."""
    running = running_sums(tokens.sort(dim=-1, descending=True).values, gamma.dtype)
    share = gamma.unsqueeze(-1)
    return (((running <= share) | (share >= 1)).sum(-1) + 1) // 128 + 1


def _top(values: Tensor, count: Tensor) -> Tensor:
    """The `count` largest entries, with the first one always among them."""
    values = values.clone()
    values[..., 0] = float("inf")
    return ranks(values, torch.ones_like(values, dtype=torch.bool)) < count.clamp(min=1).unsqueeze(-1)


def _distance_with_nan(estimated: Tensor, true: Tensor) -> Tensor:
    """Jensen-Shannon distance where 0 * log 0 is NaN."""
    middle = (estimated + true) / 2
    divergence = (estimated * (estimated / middle).log()).sum(-1) + (true * (true / middle).log()).sum(-1)
    return (divergence / 2).clamp(min=0).sqrt()
