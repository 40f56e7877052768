"""Interrupts between any two lines of flexmask's code."""

import inspect
import sys
import threading
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import flexmask

_FOLDERS = tuple(str(path.resolve()) + "/" for path in Path(flexmask.__file__).parent.iterdir() if path.is_dir())
_FOLDERS += (str(Path(flexmask.__file__).resolve().parent) + "/",)


def interrupted(work: Callable[[], Any], within: Collection[str]) -> Iterator[str]:
    """Run `work` again and again, each time with a KeyboardInterrupt before the next line or return of flexmask's files `within`.

    Gives the place after each run, and stops when `work` has come to its end.
    """
    number = 0
    while place := _run(work, number, within):
        yield place
        number += 1


def _run(work: Callable[[], Any], number: int, within: Collection[str]) -> str | None:
    seen, place = 0, None

    def trace(frame, event, argument):
        nonlocal seen, place
        path = frame.f_code.co_filename
        if not path.startswith(_FOLDERS) or Path(path).name not in within:
            return None
        # Python swallows what a generator raises that is dropped
        if event == "line" or (event == "return" and not frame.f_code.co_flags & inspect.CO_GENERATOR):
            seen += 1
            if seen > number:
                place = f"{Path(path).name}:{frame.f_lineno}, a {event}"
                sys.settrace(None)
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(before)
    return place


def in_another_thread(work: Callable[[], Any]) -> None:
    """Run `work` where a lock that an interrupt left held would be waited for."""
    errors: list[BaseException] = []

    def guarded() -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=guarded, daemon=True)
    thread.start()
    thread.join(300)
    assert not thread.is_alive(), "waits for a lock"
    if errors:
        raise errors[0]
