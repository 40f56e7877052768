"""Functions that run under a lock."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


def locked(lock: contextlib.AbstractContextManager[Any]) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Decorate a function to run under `lock`, which is released also if a debugger or tracer raises between two lines."""

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        @functools.wraps(function)
        def run(*args: P.args, **kwargs: P.kwargs) -> T:
            # on one line: a `with` that ends on a line of its own can be interrupted there, before the release
            with lock: return function(*args, **kwargs)  # noqa: E701  # fmt: skip

        return run

    return decorate
