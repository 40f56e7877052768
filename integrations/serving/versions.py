"""The served releases of the engines, and the check of release and interfaces at start-up.

The newest two minor releases of each engine are served (docs/serving-measurements.md says what was run on which). A newer one is
served with a warning if its interfaces fit. An older one is refused; the message names the last release of flexmask that served
it.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from typing import Any

SERVED = {"vLLM": ((0, 32), (0, 33)), "SGLang": ((0, 5, 22), (0, 5, 23))}
"""The releases that are served, oldest and newest"""
# by engine and release: the last release of flexmask that served it. None has been dropped since the first
LAST_SERVED_BY: dict[tuple[str, tuple[int, ...]], str] = {}


def release_of(version: str, length: int) -> tuple[int, ...]:
    """The first `length` numbers of a version, padded with 0."""
    numbers = [int(number) for number in re.findall(r"\d+", version)[:length]]
    return tuple(numbers + [0] * (length - len(numbers)))


def refuse_older(engine: str, version: str) -> None:
    """Raise ImportError for a release older than those in `SERVED`, whose interfaces flexmask does not know."""
    oldest = SERVED[engine][0]
    release = release_of(version, len(oldest))
    if release < oldest:
        last = LAST_SERVED_BY.get((engine, release))
        by = f"flexmask {last} served last" if last else "no release of flexmask has served"
        raise ImportError(f"{_served(engine, version)}, which {by}")


def check_interfaces(engine: str, version: str, faults: list[str]) -> str | None:
    """Raise ImportError for `faults` in an engine's interfaces; return a warning for a release newer than those in `SERVED`."""
    if faults:
        raise ImportError(
            f"{_served(engine, version)}, whose interfaces differ from those that flexmask needs: {'; '.join(faults)}"
        )
    newest = SERVED[engine][-1]
    if release_of(version, len(newest)) <= newest:
        return None
    return (
        f"{_served(engine, version)}, which flexmask has not been tested with. Its interfaces match, so flexmask runs. "
        "At gamma 1, compare answers with a server without flexmask"
    )


def _served(engine: str, version: str) -> str:
    releases = " and ".join(".".join(map(str, release)) for release in SERVED[engine])
    return f"flexmask serves {engine} {releases}; got {version}"


def faults_in(found: Mapping[str, Any], wanted: Mapping[str, tuple[str | None, ...] | set[str]]) -> list[str]:
    """Differences between the interfaces `found` in an engine and those `wanted`.

    ``holder.name`` with a tuple wants a function of a module or class in `found`, whose first arguments have these names, None
    for any. A name with a set wants an entry of `found` that has these names (`names_of`).
    """
    faults = []
    for name, wishes in wanted.items():
        if isinstance(wishes, set):
            absent = sorted(wishes - names_of(found[name]))
            faults += [f"{name} must have {', '.join(absent)}"] if absent else []
            continue
        holder, _, attribute = name.rpartition(".")
        function = getattr(found[holder], attribute, None)
        names = [] if function is None else [x for x in inspect.signature(function).parameters if x != "self"]
        if len(names) < len(wishes) or any(wish not in (None, got) for wish, got in zip(wishes, names, strict=False)):
            faults.append(f"{name} must take {', '.join(wish or '...' for wish in wishes)}; got {', '.join(names) or 'none'}")
    return faults


def names_of(thing: Any) -> set[str]:
    """All attribute names: the elements of a set; of a module or class its attributes and fields, and what ``__init__`` sets.

    Fields are those of a dataclass or of msgspec.
    """
    if isinstance(thing, set):
        return thing
    fields = (getattr(thing, kind, ()) for kind in ("__dataclass_fields__", "__struct_fields__"))
    return set(dir(thing)).union(*fields, names_in(thing, "__init__"))


def names_in(owner: Any, function: str) -> set[str]:
    """Names that a function of a module or class uses, and functions of the same name in the class's bases."""
    owners = owner.__mro__ if isinstance(owner, type) else (owner,)
    codes = [getattr(vars(holder).get(function), "__code__", None) for holder in owners]
    return {name for code in codes if code is not None for name in code.co_names}
