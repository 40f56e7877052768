"""Programs of the repository that the wheel does not hold: ``flexmask demo``, ``bench`` and ``fidelity`` start them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

import flexmask
from flexmask.commands import exit_codes
from flexmask.commands.errors import CommandError, usage_error
from flexmask.commands.output import Json, Output

_VARIABLE = "FLEXMASK_CHECKOUT"
Checkout = Annotated[
    Path | None, typer.Option("--checkout", metavar="DIR", envvar=_VARIABLE, help="A checkout of flexmask's repository.")
]


def demo(context: typer.Context, checkout: Checkout = None, as_json: Json = False) -> None:
    """Try it: a small model answers questions on 16k tokens.

    With dense attention, with FlexPrefill, and with tuned gammas. What `make demo` runs. All other words go to it:
    flexmask demo -- --help.
    """
    _start("bench.demo", context.args, checkout, as_json)


def bench(context: typer.Context, checkout: Checkout = None, as_json: Json = False) -> None:
    """Measure one part of the speed report.

    Parts: latency, breakeven, stages, memory, compile, long. What `make bench PART=...` runs; it stops by itself, and the same
    command goes on. All other words go to it: flexmask bench latency --minutes 5.
    """
    _start("bench.parts", context.args, checkout, as_json)


def fidelity(context: typer.Context, checkout: Checkout = None, as_json: Json = False) -> None:
    """Measure what selections lose on texts, needles and tasks.

    What python -m bench.fidelity.run runs. All other words go to it: flexmask fidelity -- --help.
    """
    _start("bench.fidelity.run", context.args, checkout, as_json)


def find_checkout(given: Path | None = None) -> Path:
    """The folder of the repository: `given`, that of the imported flexmask, or the current one.

    Raises
    ------
    CommandError
        Where none of them holds ``bench``.
    """
    places = [given] if given is not None else [Path(flexmask.__file__).resolve().parents[1], Path.cwd()]
    found = next((place for place in places if (place / "bench" / "demo.py").is_file()), None)
    if found is not None:
        return found
    if given is not None:
        usage_error(f"{given} is no checkout of flexmask: it has no bench/demo.py", "--checkout")
    raise CommandError(
        "the benchmarks are not in the installed package: unpack the source distribution or clone the repository, "
        f"pip install -e '.[dev]' there, and run this in it or with --checkout DIR ({_VARIABLE})",
        exit_codes.MISSING,
    )


def _start(module: str, arguments: list[str], checkout: Path | None, as_json: bool) -> None:
    """Run a module of the checkout in the current folder; with JSON the lines that it prints become a field."""
    folder = find_checkout(checkout).resolve()
    paths = filter(None, [str(folder), os.environ.get("PYTHONPATH")])
    process: Any = subprocess.run(
        [sys.executable, "-m", module, *arguments],
        # without the current folder, which may have a `bench` of its own (Python 3.11)
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONSAFEPATH": "1"},
        stdout=subprocess.PIPE if as_json else None,
        text=True,
        check=False,
    )
    document = {"module": module, "arguments": arguments, "checkout": str(folder), "exit_code": process.returncode}
    Output(as_json).result(document | {"output": (process.stdout or "").splitlines()})
    if process.returncode:
        raise typer.Exit(exit_codes.PROBLEM if process.returncode < 0 else process.returncode)
