"""Groups of heads that keep the memory of masks within a limit."""

from __future__ import annotations

from torch import Tensor

from flexmask.base.inputs import HeadGroup


def head_groups(query: Tensor, key: Tensor, at_once: int | None, shared: bool = False) -> list[HeadGroup]:
    """Groups of equal size of at most `at_once` heads, at least one; all heads of a batch row if they are `shared`.

    None: one group of all. Splits batch rows first, then key heads with their query heads, then one key head's query heads.
    """
    batch, num_heads, num_kv_heads = query.shape[0], query.shape[1], key.shape[1]
    if at_once is None:
        at_once = batch * num_heads
    elif shared:
        at_once = max(at_once, num_heads)
    groups = num_heads // num_kv_heads
    rows = _largest_divisor(batch, at_once // num_heads)
    keys = _largest_divisor(num_kv_heads, at_once // groups)
    queries = keys * _largest_divisor(groups, at_once)
    return [
        HeadGroup(slice(b, b + rows), slice(h, h + queries), slice(h // groups, h // groups + keys))
        for b in range(0, batch, rows)
        for h in range(0, num_heads, queries)
    ]


def _largest_divisor(number: int, limit: int) -> int:
    """Largest divisor of `number` up to `limit`, at least 1."""
    if limit >= number:
        return number
    # a list: torch 2.8 cannot trace max of a generator
    return max([d for d in range(1, number + 1) if number % d == 0 and d <= max(1, limit)])
