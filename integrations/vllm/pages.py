"""Gathers keys and values of one request from the pages of vLLM's cache, whose order on CPUs depends on the instruction set."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flexmask.integrations.serving.engine import Stock

FP8_CACHES = {"fp8": torch.float8_e4m3fn, "fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
"""Caches of bytes by vLLM's name; keys and values have one scale each per layer, or one per key head."""


class PageTable:
    """Pages and slots of a request's tokens from `first` to before `stop`, made once per step for all layers."""

    def __init__(self, pages: Tensor, stop: int, first: int = 0) -> None:
        self._pages = pages
        self.first, self.stop = first, stop
        self._made: dict[Any, Any] = {}

    def _once(self, key: Any, make: Callable[[], Any]) -> Any:
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]

    def since(self, first: int) -> PageTable:
        """The same without tokens before `first`."""
        return self if first == self.first else self._once(("since", first), lambda: PageTable(self._pages, self.stop, first))

    def pages_and_offsets(self, page_size: int) -> tuple[Tensor, Tensor]:
        """Page of every token, and the token's offset in it, (tokens,) int64 each."""

        def make() -> tuple[Tensor, Tensor]:
            token = torch.arange(self.first, self.stop, device=self._pages.device)
            return self._pages[token // page_size].long(), token % page_size

        return self._once(("offsets", page_size), make)

    def slots(self, page_size: int) -> Tensor:
        """Slot of every token among those of all pages, (tokens,) int64."""
        page, offset = self.pages_and_offsets(page_size)
        return self._once(("slots", page_size), lambda: page * page_size + offset)

    def pages(self, page_size: int) -> Tensor:
        """The pages that the tokens fill, (pages,) int64."""
        return self._pages[self.first // page_size : -(-self.stop // page_size)].long()


def gathered(cache: Tensor, page_table: PageTable, head_dim: int) -> tuple[Tensor, Tensor]:
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
        rows = cache.transpose(1, 2).view(pages * page_size, heads * width)[page_table.slots(page_size)]
        by_head = rows.view(-1, heads, width).transpose(0, 1)
        return by_head[..., :head_dim], by_head[..., head_dim:]
    page, offset = page_table.pages_and_offsets(page_size)
    by_head = cache.transpose(0, 1)
    return by_head[:, page, offset, :head_dim], by_head[:, page, offset, head_dim:]


def in_fp8(numbers: Tensor, cache: str) -> Tensor:
    """The numbers of a cache, one of `FP8_CACHES`, which may be given as bytes."""
    return numbers if numbers.is_floating_point() else numbers.view(FP8_CACHES[cache])


_BASE = 8  # of the element numbers, whose digits are exact in every cache dtype
Write = Callable[[Tensor, Tensor, Tensor], None]  # of keys and values, (tokens, 1, head_dim) each, into a cache of one page


class ReadsCPUCache(Stock):  # type: ignore[misc]
    """Mixin before `SparsePrefillImpl`: finds the cache's order by writing through the stock implementation."""

    flexmask_orders: tuple[Tensor, Tensor] | None = None

    def flexmask_gather(self, layer: Any, kv_cache: Tensor, page_table: PageTable) -> tuple[Tensor, Tensor]:
        page_size, head_dim = kv_cache.shape[2], kv_cache.shape[3] // 2
        cache = in_fp8(kv_cache, self.kv_cache_dtype)
        if self.flexmask_orders is None:
            unscaled = copy.copy(layer)
            unscaled._k_scale_float = unscaled._v_scale_float = 1.0

            def write(keys: Tensor, values: Tensor, page: Tensor) -> None:
                dtype = keys.dtype if keys.dtype.itemsize > 1 else torch.bfloat16
                rows = (keys.to(dtype), values.to(dtype))
                self.do_kv_cache_update(unscaled, *rows, page.view(kv_cache.dtype), torch.arange(page_size))

            self.flexmask_orders = order_of_cache(page_size, head_dim, cache.dtype, write)
        return gathered_on_cpu(kv_cache, page_table, head_dim, self.flexmask_orders)


def halves(cache: Tensor) -> tuple[Tensor, ...]:
    """(pages, num_kv_heads, page_size * head_dim) each."""
    pages, heads, page_size, both = cache.shape
    return cache.view(pages, heads, page_size * both).chunk(2, -1)


def order_of_cache(page_size: int, head_dim: int, dtype: torch.dtype, write: Write) -> tuple[Tensor, Tensor]:
    """Indices in a page of its keys and values, by ``token * head_dim + dimension``, int64; RuntimeError if elements are lost."""
    size = page_size * head_dim
    number = torch.arange(size)
    totals = [torch.zeros(size, dtype=torch.int64) for _ in range(2)]
    place = 1
    while place < size:  # the numbers of elements, digit by digit
        digits = (number // place) % _BASE
        rows = digits.to(dtype).view(page_size, 1, head_dim)
        cache = torch.zeros(1, 1, page_size, 2 * head_dim, dtype=dtype)
        write(rows, rows.clone(), cache)
        for half, total in zip(halves(cache), totals, strict=True):
            total += half.reshape(size).to(torch.int64) * place
        place *= _BASE
    orders = []
    for total in totals:
        if not torch.equal(total.sort().values, number):
            raise RuntimeError(f"vLLM's CPU cache keeps its pages of {page_size} tokens in an order that flexmask cannot read")
        orders.append(total.argsort())
    return orders[0], orders[1]


def gathered_on_cpu(cache: Tensor, page_table: PageTable, head_dim: int, orders: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Keys and values, (num_kv_heads, tokens, head_dim) each and contiguous."""
    page_size = cache.shape[2]
    pages, first = page_table.pages(page_size), page_table.first % page_size
    both = []
    for half, order in zip(halves(cache), orders, strict=True):
        # (pages, heads, elements in order) -> (heads, tokens, head_dim)
        rows = half[pages][:, :, order].unflatten(-1, (page_size, head_dim)).transpose(0, 1)
        both.append(rows.flatten(1, 2)[:, first : first + page_table.stop - page_table.first].contiguous())
    return both[0], both[1]
