"""The exit codes of every command; docs/command-line.md has the same table."""

OK = 0
# the command ran and found a problem, or could not finish
PROBLEM = 1
# an unknown option, a value out of its range, a file that is missing or is not what it should be
USAGE = 2
# an optional package is missing
MISSING = 3
# by Ctrl-C, as shells count it: 128 + SIGINT
INTERRUPTED = 130
