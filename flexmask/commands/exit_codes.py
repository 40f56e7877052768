"""Exit codes of the commands (docs/command-line.md)."""

OK = 0
PROBLEM = 1  # found one, or could not finish
USAGE = 2
MISSING = 3  # an optional package
INTERRUPTED = 130  # 128 + SIGINT
