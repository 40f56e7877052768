"""The program's commands, and the options before them."""

from __future__ import annotations

from typing import Annotated

import typer

from flexmask.commands.doctor import doctor
from flexmask.commands.errors import TRACEBACK_VARIABLE, Group
from flexmask.commands.gain import gain
from flexmask.commands.inspect import inspect
from flexmask.commands.tune import tune

app = typer.Typer(
    name="flexmask",
    cls=Group,
    help="Sparse prefill attention: check a machine and a model, measure the gain, inspect, tune.",
    no_args_is_help=True,
    # `Group` prints errors
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
        bool, typer.Option("--traceback", help=f"Show the traceback of an error, as {TRACEBACK_VARIABLE}=1 does.")
    ] = False,
) -> None:
    """Sparse prefill attention: check a machine and a model, measure the gain, inspect, tune."""
    # `Group` reads --traceback


for _command in (doctor, gain, inspect, tune):
    app.command()(_command)
