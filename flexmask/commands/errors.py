"""Errors of the commands: one line on stderr and an exit code, instead of a traceback."""

from __future__ import annotations

import contextlib
import os
import sys
import traceback
from collections.abc import Iterator
from typing import Any, NoReturn

import typer
from typer.core import TyperGroup

from flexmask.commands import INTERRUPTED, MISSING, PROBLEM

TRACEBACK_VARIABLE = "FLEXMASK_TRACEBACK"


class CommandError(Exception):
    """Ends a command with a message and the exit code `code`."""

    def __init__(self, message: str, code: int = PROBLEM) -> None:
        super().__init__(message)
        self.code = code


def usage_error(message: str, option: str | None = None) -> NoReturn:
    """Exit with the code for a wrong command line, naming the option."""
    raise typer.BadParameter(message, param_hint=None if option is None else f"'{option}'")


def needs(package: str, extra: str) -> CommandError:
    """The error for a missing optional package."""
    return CommandError(f"this command needs {package}: pip install 'flexmask[{extra}]'", MISSING)


@contextlib.contextmanager
def option_errors(*options: str, otherwise: str | None = None, **by_name: str) -> Iterator[None]:
    """Turn the library's errors about arguments, and unreadable files, into errors about options.

    ``gamma must be in (0, 1]; got 2`` becomes an error of ``--gamma`` if that is in `options`, else of what `by_name` has for the
    argument, else of `otherwise`; without one it is raised again.
    """
    try:
        yield
    except (OSError, TypeError, ValueError) as error:
        from flexmask.selector import UnknownOption

        name = error.option if isinstance(error, UnknownOption) else str(error).partition(" ")[0].partition("[")[0]
        option = next((known for known in options if known == f"--{name.replace('_', '-')}"), by_name.get(name, otherwise))
        if option is None:
            raise
        message = (
            f"cannot read {error.filename}: {error.strerror}" if isinstance(error, OSError) and error.strerror else str(error)
        )
        usage_error(message, option)


class Group(TyperGroup):
    """The commands; an exception ends as one line and an exit code."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            print("flexmask: interrupted", file=sys.stderr)
            raise typer.Exit(INTERRUPTED) from None
        except CommandError as error:
            shown: Exception = error
            message, code = str(error), error.code
        # anything else is a bug, and shows its traceback
        except (ImportError, NotImplementedError, OSError, RuntimeError, TypeError, ValueError) as error:
            if isinstance(error, (typer.Exit, typer.Abort)):  # which are RuntimeErrors
                raise
            shown = error
            message, code = f"{type(error).__name__}: {error}", PROBLEM
        if ctx.params.get("traceback") or os.environ.get(TRACEBACK_VARIABLE, "") not in ("", "0"):
            traceback.print_exception(shown)
        print(f"flexmask: {message.strip()}", file=sys.stderr)
        raise typer.Exit(code)
