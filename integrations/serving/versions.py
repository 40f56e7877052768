"""Checks an engine's release and interfaces at start-up."""

from __future__ import annotations

import inspect
import re
from collections.abc import Collection, Mapping
from typing import Any


def release_of(version: str, length: int) -> tuple[int, ...]:
    """The first `length` numbers of a version, padded with 0."""
    numbers = [int(number) for number in re.findall(r"\d+", version)[:length]]
    return tuple(numbers + [0] * (length - len(numbers)))


def check_release(engine: str, version: str, run: Collection[tuple[int, ...]], faults: list[str]) -> str | None:
    """Raise ImportError for `faults` in interfaces and for releases older than those in `run`; return a warning for newer."""
    release = release_of(version, len(max(run)))
    releases = ", ".join(".".join(map(str, known)) for known in sorted(run))
    start = f"flexmask was run with {engine} {releases}; got {version}"
    if release not in run and release < max(run):
        raise ImportError(f"{start}, which it was not run with")
    if faults:
        raise ImportError(f"{start}, whose interfaces are others: {'; '.join(faults)}")
    if release in run:
        return None
    return (
        f"{start}, which it was not run with. Its interfaces fit: it is served. "
        "Compare answers at gamma 1 with a server without flexmask"
    )


def faults_in(found: Mapping[str, Any], wanted: Mapping[str, tuple[str | None, ...] | set[str]]) -> list[str]:
    """Differences of what an engine has, by name in `found`, from what is `wanted` of it.

    ``holder.name`` with a tuple is a function of a module or class in `found`: its first arguments have these names, None for
    any. A name with a set is an entry of `found` that must have these names (`names_of`).
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
    """A set's own; what a module or class has, as a field of a dataclass or of msgspec too, or its ``__init__`` sets."""
    if isinstance(thing, set):
        return thing
    fields = (getattr(thing, kind, ()) for kind in ("__dataclass_fields__", "__struct_fields__"))
    return set(dir(thing)).union(*fields, names_in(thing, "__init__"))


def names_in(owner: Any, function: str) -> set[str]:
    """Attributes that a function of a module or class, or of the class's bases, reads or sets."""
    owners = owner.__mro__ if isinstance(owner, type) else (owner,)
    codes = [getattr(vars(holder).get(function), "__code__", None) for holder in owners]
    return {name for code in codes if code is not None for name in code.co_names}
