"""Answers behind sparse prefills: ``python -m bench.answers prompts``, then ``run``, then ``table``."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from bench.answers import evaluate, prompts, table


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(required=True)
    for name, module in (("prompts", prompts), ("run", evaluate), ("table", table)):
        command = commands.add_parser(name, description=module.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
        module.add_arguments(command)
        command.set_defaults(main=module.main)
    options = parser.parse_args(arguments)
    options.main(options)


if __name__ == "__main__":
    main()
