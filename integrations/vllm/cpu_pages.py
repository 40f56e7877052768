"""Reads the cache of vLLM's CPU backend, whose order depends on the instruction set."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flexmask.integrations.vllm.pages import FP8_CACHES, PageTable

# of the element numbers, whose digits are exact in every cache dtype
_BASE = 8
# of keys and values, (tokens, 1, head_dim) each, into a cache of one page
Write = Callable[[Tensor, Tensor, Tensor], None]


class ReadsCPUCache:
    """Mixin before `SparsePrefillImpl`: finds the cache's order by writing through the stock implementation."""

    flexmask_orders: tuple[Tensor, Tensor] | None = None

    def flexmask_gather(self, layer: Any, kv_cache: Tensor, page_table: PageTable) -> tuple[Tensor, Tensor]:
        stock: Any = self
        page_size, head_dim = kv_cache.shape[2], kv_cache.shape[3] // 2
        cache = kv_cache if kv_cache.is_floating_point() else kv_cache.view(FP8_CACHES[stock.kv_cache_dtype])
        if self.flexmask_orders is None:
            write = functools.partial(_write, stock, _Unscaled(layer), kv_cache.dtype)
            self.flexmask_orders = order_of_cache(page_size, head_dim, cache.dtype, write)
        return gathered_on_cpu(kv_cache, page_table, head_dim, self.flexmask_orders)


class _Unscaled:
    """A layer whose cache scales are 1."""

    _k_scale_float = _v_scale_float = 1.0

    def __init__(self, layer: Any) -> None:
        self._layer = layer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layer, name)


def _write(stock: Any, layer: Any, stored: torch.dtype, keys: Tensor, values: Tensor, cache: Tensor) -> None:
    dtype = keys.dtype if keys.dtype.itemsize > 1 else torch.bfloat16
    rows = (keys.to(dtype), values.to(dtype))
    stock.do_kv_cache_update(layer, *rows, cache.view(stored), torch.arange(cache.shape[2]))


def halves(cache: Tensor) -> tuple[Tensor, Tensor]:
    """(pages, num_kv_heads, page_size * head_dim) each."""
    pages, heads, page_size, both = cache.shape
    keys, values = cache.view(pages, heads, page_size * both).chunk(2, -1)
    return keys, values


def order_of_cache(page_size: int, head_dim: int, dtype: torch.dtype, write: Write) -> tuple[Tensor, Tensor]:
    """The indices in a page of its keys and values, by element ``token * head_dim + dimension``: (page_size * head_dim,) int64.

    Writes element numbers digit by digit and reads the cache back. Raises RuntimeError if the cache loses elements.
    """
    size = page_size * head_dim
    number = torch.arange(size)
    totals = [torch.zeros(size, dtype=torch.int64) for _ in range(2)]
    place = 1
    while place < size:
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
    made = []
    for half, order in zip(halves(cache), orders, strict=True):
        # (pages, heads, elements in order) -> (heads, tokens, head_dim)
        rows = half[pages][:, :, order].unflatten(-1, (page_size, head_dim)).transpose(0, 1)
        made.append(rows.flatten(1, 2)[:, first : first + page_table.stop - page_table.first].contiguous())
    return made[0], made[1]
