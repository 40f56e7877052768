"""Gathers one request's keys and values from the pages of vLLM's cache."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flexmask._torch import HAS_TRITON

FP8_CACHES = {"fp8": torch.float8_e4m3fn, "fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
"""Dtypes of FP8 caches by vLLM's name; keys and values have one scale each per layer, or one per KV head."""


class PageTable:
    """Pages and offsets of a request's tokens from `first` to before `stop`, made once per step for all layers."""

    def __init__(self, page_ids: Tensor, stop: int, first: int = 0) -> None:
        self.page_ids = page_ids.contiguous()  # (pages,) int32: the request's row of vLLM's block table
        self.first, self.stop = first, stop
        self._cache: dict[Any, Any] = {}

    def _once(self, key: Any, make: Callable[[], Any]) -> Any:
        if key not in self._cache:
            self._cache[key] = make()
        return self._cache[key]

    def since(self, first: int) -> PageTable:
        """The table without tokens before `first`."""
        return self if first == self.first else self._once(("since", first), lambda: PageTable(self.page_ids, self.stop, first))

    def pages_and_offsets(self, page_size: int) -> tuple[Tensor, Tensor]:
        """Page of every token, and the token's offset in it, (tokens,) int64 each."""

        def make() -> tuple[Tensor, Tensor]:
            token = torch.arange(self.first, self.stop, device=self.page_ids.device)
            return self.page_ids[token // page_size].long(), token % page_size

        return self._once(("offsets", page_size), make)


def gathered(cache: Tensor, page_table: PageTable, head_dim: int) -> tuple[Tensor, Tensor]:
    """Keys and values, (num_kv_heads, tokens, head_dim) each, from the cache of FLASH_ATTN or TRITON_ATTN.

    The cache is (pages, num_kv_heads, tokens per page, 2 * head_dim), keys before values, in any memory order.
    Raises RuntimeError for another shape.
    """
    if cache.dim() != 4 or cache.shape[3] != 2 * head_dim:
        raise RuntimeError(
            f"vLLM's cache must be (pages, num_kv_heads, tokens in a page, {2 * head_dim}); got shape {tuple(cache.shape)}"
        )
    pages, heads, page_size, width = cache.shape
    page, offset = page_table.pages_and_offsets(page_size)
    if cache.stride() == (page_size * heads * width, width, heads * width, 1):
        # vLLM's default order: torch gathers whole rows of memory several times as fast as single numbers
        rows = cache.transpose(1, 2).view(pages * page_size, heads * width)[page * page_size + offset]
        by_head = rows.view(-1, heads, width).transpose(0, 1)
        return by_head[..., :head_dim], by_head[..., head_dim:]
    by_head = cache.transpose(0, 1)
    return by_head[:, page, offset, :head_dim], by_head[:, page, offset, head_dim:]


def kernel_serves(cache: Tensor, chunk: tuple[Tensor, Tensor]) -> bool:
    """True if `pages_kernel` can read both: one dtype, on a GPU, and the numbers of a token in one head contiguous."""
    # `gathered` refuses shapes that do not fit
    key, value = chunk
    _, num_kv_heads, head_dim = key.shape
    fits = key.shape == value.shape and cache.dim() == 4 and cache.shape[1::2] == (num_kv_heads, 2 * head_dim)
    tensors = (cache, key, value)
    return HAS_TRITON and fits and all(x.is_cuda and x.dtype == cache.dtype and x.stride(-1) == 1 for x in tensors)


def viewed_in_cache_dtype(numbers: Tensor, cache_dtype: str) -> Tensor:
    """`numbers`; bytes are viewed in the FP8 dtype of `cache_dtype` (`FP8_CACHES`)."""
    return numbers if numbers.is_floating_point() else numbers.view(FP8_CACHES[cache_dtype])
