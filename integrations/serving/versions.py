"""The check of an engine at start-up: whether its release was run, and whether another one's interfaces fit."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Collection
from typing import Any


def release_of(version: str, length: int) -> tuple[int, ...]:
    """The first `length` numbers of a version; those that it lacks are 0."""
    numbers = [int(number) for number in re.findall(r"\d+", version)[:length]]
    return tuple(numbers + [0] * (length - len(numbers)))


def check_release(engine: str, version: str, run: Collection[tuple[int, ...]], faults: list[str]) -> str | None:
    """Refuse an engine whose interfaces are not those that the plug-in stands on, and one that is older than what was run.

    Parameters
    ----------
    engine, version
        Its name, and the installed version.
    run
        The releases that were run, numbers of one length.
    faults
        Those of its interfaces (`wrong_arguments`, `absent_names`).

    Returns
    -------
    str
        A warning for a newer release than those that were run; None for these.

    Raises
    ------
    ImportError
        With the release that is installed, those that were run, and what does not fit.
    """
    release, told = release_of(version, len(max(run))), ", ".join(".".join(map(str, each)) for each in sorted(run))
    told = f"flexmask was run with {engine} {told}; got {version}"
    if release not in run and release < max(run):
        raise ImportError(f"{told}, which it was not run with")
    if faults:
        raise ImportError(f"{told}, whose interfaces are others: {'; '.join(faults)}")
    if release in run:
        return None
    return (
        f"{told}, which it was not run with. Its interfaces fit: it is served. "
        "Compare answers at gamma 1 with a server without flexmask"
    )


def wrong_arguments(name: str, function: Any, wanted: tuple[str | None, ...]) -> list[str]:
    """One fault unless a function takes these arguments first, None for one of any name."""
    found = [] if function is None else [each for each in inspect.signature(function).parameters if each != "self"]
    if len(found) >= len(wanted) and all(each in (None, got) for each, got in zip(wanted, found, strict=False)):
        return []
    return [f"{name} must take {', '.join(each or '...' for each in wanted)}; got {', '.join(found) or 'none'}"]


def absent_names(owner: str, wanted: set[str], names: Collection[str]) -> list[str]:
    """One fault unless all the wanted names are there."""
    absent = sorted(wanted - set(names))
    return [f"{owner} must have {', '.join(absent)}"] if absent else []


def fields_of(cls: Any) -> set[str]:
    """Names of a dataclass's fields."""
    return {each.name for each in dataclasses.fields(cls)}
