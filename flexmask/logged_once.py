"""Remembers messages that the process has logged and does not repeat."""

from __future__ import annotations

from collections.abc import Hashable

_SAID: set[Hashable] = set()


def first_time(*words: Hashable) -> bool:
    """True at the first call with these words."""
    if words in _SAID:
        return False
    _SAID.add(words)
    return True
