"""Keys and values of one request from the cache of vLLM's CPU backend, whose order depends on the instruction set."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from flexmask.integrations.vllm.pages import Places

# digits of the numbers that are written to find the order: base 128 is exact in every dtype of a cache
_BASE, _DIGITS = 128, 3
# writes keys and values, (tokens, 1, head_dim) each, into a cache of one page
Write = Callable[[Tensor, Tensor, Tensor], None]


def halves(cache: Tensor) -> tuple[Tensor, Tensor]:
    """The key half and the value half of each page and head, (pages, num_kv_heads, page_size * head_dim) each."""
    pages, heads, page_size, both = cache.shape
    keys, values = cache.view(pages, heads, page_size * both).chunk(2, -1)
    return keys, values


def order_of_cache(page_size: int, head_dim: int, dtype: torch.dtype, write: Write) -> tuple[Tensor, Tensor]:
    """Find the place of each element of a page's keys, and of its values: (page_size * head_dim,) int64 each.

    Element ``token * head_dim + dimension`` stands at that place. It is found by writing numbered elements, a digit at a time,
    and looking for them.

    Raises
    ------
    RuntimeError
        If the backend does not keep every element: the cache cannot be read then.
    """
    size = page_size * head_dim
    number = torch.arange(size)
    found = [torch.zeros(size, dtype=torch.int64) for _ in range(2)]
    for digit in range(_DIGITS):
        digits = (number // _BASE**digit) % _BASE
        rows = digits.to(dtype).view(page_size, 1, head_dim)
        cache = torch.zeros(1, 1, page_size, 2 * head_dim, dtype=dtype)
        write(rows, rows.clone(), cache)
        for half, total in zip(halves(cache), found, strict=True):
            total += half.reshape(size).to(torch.int64) * _BASE**digit
    orders = []
    for total in found:
        if not torch.equal(total.sort().values, number):
            raise RuntimeError(f"vLLM's CPU cache keeps its pages of {page_size} tokens in an order that flexmask cannot read")
        orders.append(total.argsort())
    return orders[0], orders[1]


def gathered_on_cpu(cache: Tensor, places: Places, head_dim: int, orders: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Keys and values, (num_kv_heads, tokens, head_dim) each and contiguous."""
    page_size = cache.shape[2]
    pages = places.numbers(page_size)
    made = []
    for half, order in zip(halves(cache), orders, strict=True):
        # (pages, heads, elements in order) -> (heads, tokens, head_dim)
        rows = half[pages][:, :, order].unflatten(-1, (page_size, head_dim)).transpose(0, 1)
        made.append(rows.flatten(1, 2)[:, : places.tokens].contiguous())
    return made[0], made[1]
