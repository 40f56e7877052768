"""The program `flexmask`, one command per file."""
