"""Gathers keys and values of one request from the pages of the engine's cache."""

from __future__ import annotations

import torch
from torch import Tensor

FP8_CACHES = {"fp8": torch.float8_e4m3fn, "fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
"""Caches of bytes by vLLM's name; keys and values have one scale each per layer, or one per key head."""


class Places:
    """Page and place of each token of one request, made once per step for all layers."""

    def __init__(self, pages: Tensor, tokens: int) -> None:
        self._pages = pages
        self._tokens = tokens
        self._made: dict[int, tuple[Tensor, Tensor]] = {}
        self._slots: dict[int, Tensor] = {}

    def of(self, page_size: int) -> tuple[Tensor, Tensor]:
        """Page and place of every token, (tokens,) int64 each."""
        made = self._made.get(page_size)
        if made is None:
            token = torch.arange(self._tokens, device=self._pages.device)
            made = self._pages[token // page_size].long(), token % page_size
            self._made[page_size] = made
        return made

    def slots(self, page_size: int) -> Tensor:
        """Place among the tokens of all pages, (tokens,) int64."""
        made = self._slots.get(page_size)
        if made is None:
            page, place = self.of(page_size)
            made = self._slots[page_size] = page * page_size + place
        return made

    def numbers(self, page_size: int) -> Tensor:
        """The pages that the tokens fill, (pages,) int64."""
        return self._pages[: -(-self._tokens // page_size)].long()

    @property
    def tokens(self) -> int:
        return self._tokens


def gathered(cache: Tensor, places: Places, head_dim: int) -> tuple[Tensor, Tensor]:
    """Keys and values, (num_kv_heads, tokens, head_dim) each, from the cache of FLASH_ATTN or TRITON_ATTN.

    The cache is (pages, num_kv_heads, tokens per page, 2 * head_dim), keys before values, in any memory order; else RuntimeError.
    """
    if cache.dim() != 4 or cache.shape[3] != 2 * head_dim:
        raise RuntimeError(
            f"vLLM's cache must be (pages, num_kv_heads, tokens in a page, {2 * head_dim}); got shape {tuple(cache.shape)}"
        )
    pages, heads, page_size, width = cache.shape
    if cache.stride() == (page_size * heads * width, width, heads * width, 1):
        # vLLM's default order: torch gathers whole rows of memory several times as fast as single numbers
        rows = cache.transpose(1, 2).view(pages * page_size, heads * width)[places.slots(page_size)]
        by_head = rows.view(-1, heads, width).transpose(0, 1)
        return by_head[..., :head_dim], by_head[..., head_dim:]
    page, place = places.of(page_size)
    by_head = cache.transpose(0, 1)
    return by_head[:, page, place, :head_dim], by_head[:, page, place, head_dim:]


def in_fp8(numbers: Tensor, cache: str) -> Tensor:
    """The numbers of a cache, one of `FP8_CACHES`, which may be given as bytes."""
    return numbers if numbers.is_floating_point() else numbers.view(FP8_CACHES[cache])
