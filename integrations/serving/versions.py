"""The supported releases of the engines, and the check of release and interfaces at start-up."""

from __future__ import annotations

import inspect
import logging
import pkgutil
import re
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

# the newest two minor releases of each engine, older first; docs/serving-measurements.md lists what ran on which
SERVED = {"vLLM": ((0, 32), (0, 33)), "SGLang": ((0, 5, 22), (0, 5, 23))}
# by engine and release: the last release of flexmask that supported it; flexmask has dropped none yet
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


def check_interfaces(engine: str, version: str, faults: list[str]) -> None:
    """Raise ImportError for `faults` in an engine's interfaces; log a warning for a release newer than those in `SERVED`."""
    if faults:
        raise ImportError(
            f"{_served(engine, version)}, whose interfaces differ from those that flexmask needs: {'; '.join(faults)}"
        )
    newest = SERVED[engine][-1]
    if release_of(version, len(newest)) > newest:
        # engines show only loggers below their own
        logging.getLogger(f"{engine.lower()}.flexmask").warning(
            "%s, which flexmask has not been tested with. Its interfaces match, so flexmask runs. "
            "At gamma 1, compare answers with a server without flexmask",
            _served(engine, version),
        )


def _served(engine: str, version: str) -> str:
    releases = " and ".join(".".join(map(str, release)) for release in SERVED[engine])
    return f"flexmask serves {engine} {releases}; got {version}"


def faults_in(found: Mapping[str, Any], wanted: Mapping[str, tuple[str | None, ...] | set[str]]) -> list[str]:
    """Differences between the interfaces of an engine and those `wanted`.

    A key of `wanted` is a key of `found`, or a path. With a set, the object there must have these names (`names_of`). With a
    tuple, the key is ``holder.name``, a function of such an object, whose first arguments must have these names; None is any.
    """
    faults = []
    for name, wishes in wanted.items():
        if isinstance(wishes, set):
            absent = sorted(wishes - names_of(_thing(name, found)))
            faults += [f"{name} must have {', '.join(absent)}"] if absent else []
            continue
        holder, _, attribute = name.rpartition(".")
        function = getattr(_thing(holder, found), attribute, None)
        names = [] if function is None else [name for name in inspect.signature(function).parameters if name != "self"]
        if len(names) < len(wishes) or any(wish not in (None, got) for wish, got in zip(wishes, names, strict=False)):
            faults.append(f"{name} must take {', '.join(wish or '...' for wish in wishes)}; got {', '.join(names) or 'none'}")
    return faults


def _thing(name: str, found: Mapping[str, Any]) -> Any:
    """The entry of `found`, else the object at this path, else an object without names."""
    if name in found:
        return found[name]
    try:
        return pkgutil.resolve_name(name)
    except (ImportError, AttributeError):
        return SimpleNamespace()


def names_of(thing: Any) -> set[str]:
    """The elements of a set; of a module or class the names of its attributes and fields, and those that ``__init__`` uses."""
    if isinstance(thing, set):
        return thing
    # of a dataclass or a msgspec.Struct
    fields = (getattr(thing, kind, ()) for kind in ("__dataclass_fields__", "__struct_fields__"))
    return set(dir(thing)).union(*fields, names_in(thing, "__init__"))


def names_in(owner: Any, function: str) -> set[str]:
    """The names that a function of a module or class uses, also in the class's bases."""
    owners = owner.__mro__ if isinstance(owner, type) else (owner,)
    codes = [getattr(vars(holder).get(function), "__code__", None) for holder in owners]
    return {name for code in codes if code is not None for name in code.co_names}
