"""Checks of options that methods share, and options per head in one form."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from flexmask.base.checks import check_argument, check_int, check_int64, check_plain, check_real
from flexmask.base.scores import widest_float

# keeps one block of an even map of 8192 by 8192 blocks: a smaller share keeps no fewer
_MIN_SHARE = 2.0**-30


def check_block_size(block_size: Any) -> None:
    check_int("block_size", block_size)
    if block_size % 16 != 0 or not 16 <= block_size <= 256:
        raise ValueError(f"block_size must be a multiple of 16 from 16 to 256; got {block_size}")


def check_count(name: str, value: Any, least: int, unit: str) -> None:
    check_int64(name, value, unit)
    if value < least:
        raise ValueError(f"{name} must be >= {least} {unit}; got {value}")


def check_share(name: str, value: Any, interval: str = "(0, 1]") -> None:
    """Raise unless `value` is in the interval, ``"(0, 1]"``, ``"[0, 1]"`` or ``"[-1, 1]"``."""
    check_real(name, value)
    least = -1 if interval == "[-1, 1]" else 0
    if not least <= value <= 1 or (interval == "(0, 1]" and value == 0):
        raise ValueError(f"{name} must be in {interval}; got {value}")


def check_shares(name: str, value: Any) -> None:
    """Raise unless `value` is a number in (0, 1], a tuple of them, or a tensor, whose values are not read."""
    if isinstance(value, tuple):
        if not value:
            raise ValueError(f"{name} must be a number or hold one number per head; got an empty sequence")
        for head, share in enumerate(value):
            check_share(f"{name}[{head}]", share)
    elif not isinstance(value, Tensor):
        check_share(name, value)


def check_max_budget(max_budget: Any, min_budget: int) -> None:
    """Raise unless `max_budget` is None, or at least one token and at least `min_budget`."""
    if max_budget is not None:
        check_int64("max_budget", max_budget, "tokens")
        if max_budget < max(1, min_budget):
            raise ValueError(f"max_budget must be at least 1 token and at least min_budget ({min_budget}); got {max_budget}")


def shares_by_head(name: str, value: Any, query: Tensor) -> Any:
    """Check a number, or one per query head, and return it; a tensor in `widest_float`, clamped to (0, 1], NaN as 1."""
    num_heads = query.shape[1]
    if isinstance(value, Tensor):
        check_plain(name, value)
        check_argument(name, value, "(num_heads,)", (num_heads,), "floating", "query", query)
        return value.detach().to(widest_float(value.device)).nan_to_num(nan=1.0).clamp(_MIN_SHARE, 1.0)
    if isinstance(value, tuple) and len(value) != num_heads:
        raise ValueError(f"{name} must hold one number for each of query's {num_heads} heads; got {len(value)} numbers")
    return value


def pairs_by_head(name: str, value: Any, num_heads: int) -> tuple[tuple[float, float], ...]:
    """Check one pair of finite numbers >= 0 for all heads, or one per query head, and return a tuple of pairs."""
    expected = f"{name} must be a pair of numbers >= 0, or one pair per query head ({num_heads})"
    if not isinstance(value, Sequence) or isinstance(value, str) or len(value) == 0:
        raise TypeError(f"{expected}; got {type(value).__name__}")
    pairs = list(value) if isinstance(value[0], Sequence) else [value]
    if len(pairs) not in (1, num_heads):
        raise ValueError(f"{expected}; got {len(pairs)} pairs")
    for pair in pairs:
        if not isinstance(pair, Sequence) or isinstance(pair, str) or len(pair) != 2:
            raise ValueError(f"{expected}; got {pair!r} in it")
        for number in pair:
            check_real(name, number)
            if number < 0:
                raise ValueError(f"{expected}; got {number} in it")
    return tuple((float(first), float(second)) for first, second in pairs)
