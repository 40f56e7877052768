"""``flexmask run``: another program with attn_implementation="flexmask" registered in it and its children."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from importlib import metadata
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from flexmask.commands.errors import needs, usage_error
from flexmask.commands.options import DenseBelow, Gamma, Method, MinBudget, Option, Settings, settings_from
from flexmask.commands.output import Json, Output

STARTUP = Path(__file__).resolve().parent / "startup"
# read by startup/sitecustomize.py
SETTINGS_VARIABLE, NAME_VARIABLE = "FLEXMASK_SETTINGS", "FLEXMASK_NAME"
NAMES = ("flexmask", "flex_attention")


def run(
    context: typer.Context,
    program: Annotated[
        str | None,
        typer.Argument(metavar="MODULE", help="A module, as for python -m; a .py file; or an installed Python command."),
    ] = None,
    environment: Annotated[
        bool, typer.Option("--environment", help="Start nothing; print the variables for a shell's eval.")
    ] = False,
    name: Annotated[
        str, typer.Option("--as", help="Name to register: flexmask, or flex_attention for programs that accept only known names.")
    ] = NAMES[0],
    method: Method = None,
    gamma: Gamma = None,
    min_budget: MinBudget = None,
    dense_below: DenseBelow = None,
    settings: Settings = None,
    option: Option = None,
    as_json: Json = False,
) -> None:
    """Start another program with sparse prefill registered.

    The program then accepts attn_implementation="flexmask". Options of flexmask stand before MODULE and override a model's
    config.json. All words after MODULE are the program's own. Its exit code is the command's.
    """
    chosen = settings_from(settings, option, method=method, gamma=gamma, min_budget=min_budget, dense_below=dense_below)
    if name not in NAMES:
        usage_error(f"must be one of {', '.join(NAMES)}; got {name!r}", "--as")
    if find_spec("transformers") is None:
        raise needs("transformers", "hf")
    variables = {"PYTHONPATH": os.pathsep.join(filter(None, [str(STARTUP), os.environ.get("PYTHONPATH")]))}
    variables[NAME_VARIABLE] = name
    # empty, so a surrounding `flexmask run` does not apply
    variables[SETTINGS_VARIABLE] = "" if chosen is None else json.dumps(chosen.to_dict())
    if environment:
        output = Output(as_json)
        for name, value in variables.items():
            output.line(f"export {name}={shlex.quote(value)}")
        output.result(variables)
        return
    if program is None:
        usage_error("must be a module, a file or a command to start", "MODULE")
    _start([sys.executable, *_arguments(program), *context.args], {**os.environ, **variables})


def _arguments(program: str) -> list[str]:
    """Python's arguments that start `program`."""
    if program.endswith(".py"):
        if not Path(program).is_file():
            usage_error(f"no file {program}", "MODULE")
        return [program]
    if _runs_as_module(program):
        return ["-m", program]
    entry = next(iter(metadata.entry_points(group="console_scripts", name=program)), None)
    if entry is None:
        usage_error(f"neither a module that python -m can run nor an installed command: {program}", "MODULE")
    called = f"{entry.module}:{entry.attr}".partition(":")[2]
    code = f"import sys; from {entry.module} import {called.partition('.')[0]}; sys.argv[0] = {program!r}; sys.exit({called}())"
    return ["-c", code]


def _runs_as_module(name: str) -> bool:
    """True for a module, or a package with a ``__main__``; imports nothing."""
    # python -m looks in the current folder first
    where: list[str] | None = [os.getcwd(), *sys.path]
    parts, spec = name.split("."), None
    for at in range(len(parts)):
        if where is None or not parts[at].isidentifier():
            return False
        spec = PathFinder.find_spec(".".join(parts[: at + 1]), where)
        if spec is None:
            return False
        where = None if spec.submodule_search_locations is None else [*spec.submodule_search_locations]
    return where is None or PathFinder.find_spec(f"{name}.__main__", where) is not None


def _start(command: list[str], environment: dict[str, str]) -> None:
    """Replace this process on POSIX, which passes signals and the exit code on."""
    sys.stdout.flush()
    sys.stderr.flush()
    if os.name == "posix":
        os.execve(command[0], command, environment)
    raise typer.Exit(subprocess.run(command, env=environment, check=False).returncode)
