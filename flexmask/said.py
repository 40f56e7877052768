"""What the process has logged and does not repeat."""

from __future__ import annotations

from collections.abc import Hashable

_SAID: set[Hashable] = set()


def is_new(*words: Hashable) -> bool:
    """True the first time that the process asks."""
    if words in _SAID:
        return False
    _SAID.add(words)
    return True
