"""The one place where functions are compiled: lazily, on first use, and kept."""

from __future__ import annotations

import functools
import logging
import types
from collections.abc import Callable, Hashable
from typing import Any

import torch

from flexmask._torch import options_for_launches, ran_out_of_recompilations, recompile_limit

_log = logging.getLogger("flexmask")


def compiled(function: Callable[..., Any], *variant: Hashable, launched: bool = False) -> Callable[..., Any]:
    """`function` compiled with fullgraph, once per `variant`.

    Parameters
    ----------
    function
        A module-level function that can be traced whole.
    variant
        The constants that its calls share, apart from shapes. Every variant is compiled from its own code object, since torch
        counts recompilations by code object: one model's lengths cannot use up another's share. A size that changes between calls
        is compiled again once, as symbolic, and then serves all others.
    launched
        True if `function` launches Triton kernels of ours: torch then uses its own, faster launcher.

    Returns
    -------
    callable
        Inside a surrounding ``torch.compile`` the plain function, which inlines there. Its first call says on the logger
        "flexmask" that it compiles. Running out of recompilations raises RuntimeError rather than running uncompiled.
    """
    if torch.compiler.is_compiling():
        return function
    return _compile(function, variant, launched)


@functools.cache
def _compile(function: Callable[..., Any], variant: tuple[Hashable, ...], launched: bool) -> Callable[..., Any]:
    own = types.FunctionType(
        function.__code__.replace(), function.__globals__, function.__name__, function.__defaults__, function.__closure__
    )
    own.__kwdefaults__ = function.__kwdefaults__
    # given only where they matter: other backends than Inductor take none
    options: dict[str, Any] = {"options": options_for_launches()} if launched else {}
    run: Callable[..., Any] = torch.compile(own, fullgraph=True, **options)
    announced = False

    def call(*arguments: Any) -> Any:
        nonlocal announced
        if not announced:
            announced = True
            what = " ".join(str(part) for part in variant if isinstance(part, (str, torch.dtype)))
            _log.warning("flexmask: compiling %s (%s), once; this takes seconds to a minute", function.__name__, what)
        try:
            return run(*arguments)
        except Exception as error:
            if not ran_out_of_recompilations(error):
                raise
            raise RuntimeError(
                f"torch.compile has used up its recompilations of {function.__name__}, which never runs uncompiled: raise "
                f"torch._dynamo.config.{recompile_limit()}, or call torch.compiler.reset() if what was compiled is not needed"
            ) from error

    return call
