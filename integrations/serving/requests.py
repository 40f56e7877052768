"""What one request may choose: its gamma, or dense attention."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from flexmask.settings import PrefillSettings

PREFIX = "flexmask_"
GAMMA, DENSE = "flexmask_gamma", "flexmask_dense"


class RequestOptions(NamedTuple):
    """Options of one request; without any, None stands for it."""

    gamma: float | None = None  # of every head and layer; None: the server's
    dense: bool = False

    @property
    def salt(self) -> str:
        """Of the engine's keys for cached prefixes: keys and values depend on these options."""
        return "flexmask dense" if self.dense else f"flexmask gamma {self.gamma!r}"


def request_options(given: Any, settings: PrefillSettings) -> RequestOptions | None:
    """Read a request's options among the names that it `given`; None if they are the server's.

    Raises ValueError, which engines answer the request with, for unknown names with our prefix and for values out of range.
    """
    own = {name: value for name, value in given.items() if name.startswith(PREFIX)} if isinstance(given, Mapping) else {}
    unknown = sorted(own.keys() - {GAMMA, DENSE})
    if unknown:
        raise ValueError(f"a request takes {GAMMA} and {DENSE}; got {unknown[0]!r}")
    gamma, dense = own.get(GAMMA), own.get(DENSE, False)
    if dense not in (False, True):  # JSON of some engines has no booleans: 0 and 1
        raise ValueError(f"{DENSE} must be true or false; got {dense!r}")
    if gamma is not None:
        if dense:
            raise ValueError(f"{GAMMA} must come without {DENSE}, which no gamma changes; got {gamma!r}")
        selector = settings.selector()
        if "gamma" not in selector.method.shares:
            raise ValueError(f"{GAMMA} needs a method with gamma; this server runs {selector.method.name!r}")
        if isinstance(gamma, bool) or not isinstance(gamma, (int, float)):
            raise ValueError(f"{GAMMA} must be a number; got {type(gamma).__name__}")
        try:
            selector.method.checked(selector.block_size, {**selector.options, "gamma": gamma})
        except ValueError as error:
            raise ValueError(f"{PREFIX}{error}") from None
        return RequestOptions(gamma=float(gamma))
    return RequestOptions(dense=True) if dense else None
