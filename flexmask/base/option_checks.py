"""Checks of the options that the methods of the gallery have in common."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from flexmask.base.checks import check_int, check_int64, check_real


def check_count(name: str, value: object, least: int, unit: str) -> None:
    """Raise unless `value` is an int of at least `least`."""
    check_int(name, value)
    assert isinstance(value, int)
    check_int64(name, value, unit)
    if value < least:
        raise ValueError(f"{name} must be >= {least} {unit}; got {value}")


def check_share(name: str, value: object, zero: bool = False) -> None:
    """Raise unless `value` is a number in (0, 1], or in [0, 1] where `zero` is allowed."""
    check_real(name, value)
    assert isinstance(value, (int, float))
    if not (0 <= value <= 1 if zero else 0 < value <= 1):
        raise ValueError(f"{name} must be in {'[' if zero else '('}0, 1]; got {value}")


def pairs_by_head(name: str, value: Any, num_heads: int) -> tuple[tuple[float, float], ...]:
    """One pair of numbers for all heads, or one per query head, as a tuple of pairs; or an error.

    Numbers are finite and >= 0.
    """
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
