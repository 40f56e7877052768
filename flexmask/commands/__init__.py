"""The program `flexmask`, one command per file."""

# exit codes (docs/command-line.md); 2, a wrong command line, is typer's
PROBLEM = 1  # found one, or could not finish
MISSING = 3  # an optional package
INTERRUPTED = 130  # 128 + SIGINT
