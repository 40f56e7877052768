"""The one place where functions are compiled: lazily, on first use, and kept."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Hashable
from typing import Any

import torch


def compiled(function: Callable[..., Any], *variant: Hashable) -> Callable[..., Any]:
    """`function` compiled with fullgraph, once per `variant`.

    Parameters
    ----------
    function
        A module-level function that can be traced whole.
    variant
        What its calls have in common besides shapes. Every variant is compiled from a code object of its own, because torch
        counts recompilations by code object: one model's lengths cannot use up another's share. A size that changes between calls
        is compiled again once, as symbolic, and then serves all others.

    Returns
    -------
    callable
        Inside a surrounding ``torch.compile`` the plain function, which inlines there. Running out of recompilations raises
        (``torch._dynamo.exc.FailOnRecompileLimitHit``) rather than running uncompiled.
    """
    if torch.compiler.is_compiling():
        return function
    return _compile(function, variant)


@functools.cache
def _compile(function: Callable[..., Any], variant: tuple[Hashable, ...]) -> Callable[..., Any]:
    own = types.FunctionType(
        function.__code__.replace(), function.__globals__, function.__name__, function.__defaults__, function.__closure__
    )
    own.__kwdefaults__ = function.__kwdefaults__
    return torch.compile(own, fullgraph=True)
