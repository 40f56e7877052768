"""A plug-in of vLLM for tests on CPUs, where vLLM ignores the choice of a backend: it replaces the backends for CPUs.

vLLM finds it where this folder is on the path. It reads vLLM's cache, whose order on CPUs depends on the instruction set.
"""

from __future__ import annotations

import copy
import functools
import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

# our name: the stock backend's module, class and kernel
_STOCK = {
    "SparseCPUAttention": ("cpu_attn", "CPUAttentionBackend", "CPU_ATTN"),
    "SparseCPULatentAttention": ("mla.cpu_mla", "CPUMLABackend", "CPU_MLA"),
}


def register() -> None:
    """Register the names in `_STOCK`; every server is one of ours then."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    from flexmask.integrations.vllm import registration

    for name, (_, _, kernel) in _STOCK.items():
        register_backend(AttentionBackendEnum[kernel], f"{__name__}.{name}")
    registration.is_ours = lambda vllm_config: True


def __getattr__(name: str) -> Any:
    if name not in _STOCK:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return _backend(name)


@functools.cache
def _backend(name: str) -> type:
    from flexmask.integrations.vllm.backends import sparse_backend

    module, stock_name, kernel = _STOCK[name]
    stock = getattr(importlib.import_module(f"vllm.v1.attention.backends.{module}"), stock_name)
    made: Any = sparse_backend(name, stock, kernel)
    made.get_name = staticmethod(lambda: kernel)
    made.__module__ = __name__  # where vLLM looks it up
    if not stock.is_mla():
        reader = type(f"{name}Impl", (ReadsCPUCache, made.get_impl_cls()), {})
        made.get_impl_cls = staticmethod(lambda: reader)
    return made


_BASE = 8  # of the element numbers, whose digits are exact in every cache dtype
Write = Callable[[Tensor, Tensor, Tensor], None]  # of keys and values, (tokens, 1, head_dim) each, into a cache of one page


class ReadsCPUCache:
    """Mixin before `SparsePrefillImpl`: finds the cache's order by writing through the stock implementation."""

    flexmask_orders: tuple[Tensor, Tensor] | None = None
    kv_cache_dtype: str
    do_kv_cache_update: Callable[..., Any]

    def flexmask_gather(self, layer: Any, kv_cache: Tensor, page_table: Any) -> tuple[Tensor, Tensor]:
        from flexmask.integrations.vllm.pages import viewed_in_cache_dtype

        page_size, head_dim = kv_cache.shape[2], kv_cache.shape[3] // 2
        cache = viewed_in_cache_dtype(kv_cache, self.kv_cache_dtype)
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


def gathered_on_cpu(cache: Tensor, page_table: Any, head_dim: int, orders: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Keys and values, (num_kv_heads, tokens, head_dim) each and contiguous."""
    page_size = cache.shape[2]
    pages = page_table.page_ids[page_table.first // page_size : -(-page_table.stop // page_size)].long()
    first = page_table.first % page_size
    both = []
    for half, order in zip(halves(cache), orders, strict=True):
        # (pages, heads, elements in order) -> (heads, tokens, head_dim)
        rows = half[pages][:, :, order].unflatten(-1, (page_size, head_dim)).transpose(0, 1)
        both.append(rows.flatten(1, 2)[:, first : first + page_table.stop - page_table.first].contiguous())
    return both[0], both[1]
