"""The part of the implementation that CPUs need: reading their cache."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from flexmask.integrations.vllm.cpu_pages import gathered_on_cpu, order_of_cache
from flexmask.integrations.vllm.pages import Places


class ReadsCPUCache:
    """Mixin before `SparsePrefillImpl`: finds the order of the cache by the stock implementation's own writing."""

    flexmask_orders: tuple[Tensor, Tensor] | None = None

    def flexmask_gather(self, layer: Any, kv_cache: Tensor, places: Places) -> tuple[Tensor, Tensor]:
        """Keys and values of one request."""
        page_size, head_dim = kv_cache.shape[2], kv_cache.shape[3] // 2
        if self.flexmask_orders is None:
            write = functools.partial(self._write, layer)
            self.flexmask_orders = order_of_cache(page_size, head_dim, kv_cache.dtype, write)
        return gathered_on_cpu(kv_cache, places, head_dim, self.flexmask_orders)

    def _write(self, layer: Any, keys: Tensor, values: Tensor, cache: Tensor) -> None:
        stock: Any = self
        slots = torch.arange(cache.shape[2])
        stock.do_kv_cache_update(layer, keys, values, cache, slots)
