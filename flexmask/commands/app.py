"""The program's commands, and the options before them."""

from __future__ import annotations

import os
import sys
import traceback as tracebacks
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from flexmask.commands import INTERRUPTED, PROBLEM
from flexmask.commands.doctor import doctor
from flexmask.commands.gain import gain
from flexmask.commands.inspect import inspect
from flexmask.commands.options import CommandError

_TRACEBACK = "FLEXMASK_TRACEBACK"


class CommandGroup(TyperGroup):
    """The commands; an exception ends as one line and an exit code."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            print("flexmask: interrupted", file=sys.stderr)
            raise typer.Exit(INTERRUPTED) from None
        except (typer.Exit, typer.Abort):  # which are RuntimeErrors
            raise
        except CommandError as error:
            cause: Exception = error
            message, code = str(error), error.code
        # anything else is a bug, and shows its traceback
        except (ImportError, OSError, RuntimeError, TypeError, ValueError) as error:
            cause = error
            message, code = f"{type(error).__name__}: {error}", PROBLEM
        if ctx.params.get("traceback") or os.environ.get(_TRACEBACK, "") not in ("", "0"):
            tracebacks.print_exception(cause)
        print(f"flexmask: {message.strip()}", file=sys.stderr)
        raise typer.Exit(code)


app = typer.Typer(
    name="flexmask",
    cls=CommandGroup,
    no_args_is_help=True,
    # `CommandGroup` prints errors
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        from flexmask import __version__

        typer.echo(f"flexmask {__version__}")
        raise typer.Exit


@app.callback()
def program(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
    traceback: Annotated[
        bool, typer.Option("--traceback", help=f"Show the traceback of an error, as {_TRACEBACK}=1 does.")
    ] = False,
) -> None:
    """Sparse prefill attention: check a machine and a model, measure the gain, inspect."""
    # `CommandGroup` reads --traceback


for _command in (doctor, gain, inspect):
    app.command()(_command)
