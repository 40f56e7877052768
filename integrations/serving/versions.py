"""Checks an engine's release and interfaces at start-up."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Collection
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


def wrong_arguments(name: str, function: Any, wanted: tuple[str | None, ...]) -> list[str]:
    """One fault unless a function's first arguments have these names, None for any."""
    names = [] if function is None else [argument for argument in inspect.signature(function).parameters if argument != "self"]
    if len(names) >= len(wanted) and all(wish in (None, got) for wish, got in zip(wanted, names, strict=False)):
        return []
    return [f"{name} must take {', '.join(wish or '...' for wish in wanted)}; got {', '.join(names) or 'none'}"]


def wrong_functions(holders: dict[str, Any], wanted: dict[str, tuple[str | None, ...]]) -> list[str]:
    """`wrong_arguments` of functions by ``holder.name``, where `holders` has the modules and classes that hold them."""
    faults = []
    for name, arguments in wanted.items():
        holder, _, attribute = name.rpartition(".")
        faults += wrong_arguments(name, getattr(holders[holder], attribute, None), arguments)
    return faults


def absent_names(owner: str, wanted: set[str], names: Collection[str]) -> list[str]:
    """One fault unless all wanted names are there."""
    absent = sorted(wanted - set(names))
    return [f"{owner} must have {', '.join(absent)}"] if absent else []


def names_in(owner: Any, function: str) -> set[str]:
    """Attributes that a function of a module or class, or of the class's bases, reads or sets."""
    owners = owner.__mro__ if isinstance(owner, type) else (owner,)
    codes = [getattr(vars(holder).get(function), "__code__", None) for holder in owners]
    return {name for code in codes if code is not None for name in code.co_names}


def fields_of(cls: Any) -> set[str]:
    """Of a dataclass, or of a struct of msgspec."""
    return set(getattr(cls, "__struct_fields__", ())) or {field.name for field in dataclasses.fields(cls)}
