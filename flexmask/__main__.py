"""The program `flexmask`, also as ``python -m flexmask``; reports packages of the command line that are missing."""

from __future__ import annotations

import io
import sys

from flexmask.commands import MISSING

_NEEDED = ("typer", "rich")  # of the extra `cli`


def main() -> None:
    """Run the command that ``sys.argv`` names, and exit with its code."""
    try:
        from flexmask.commands.app import app
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] not in _NEEDED:
            raise
        print(f"flexmask: the command line needs {error.name}: pip install 'flexmask[cli]'", file=sys.stderr)
        sys.exit(MISSING)
    if isinstance(sys.stdout, io.TextIOWrapper):
        # a pipe on Windows lacks some characters
        sys.stdout.reconfigure(errors="backslashreplace")
    app(prog_name="flexmask")


if __name__ == "__main__":
    main()
