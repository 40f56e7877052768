"""``python -m flexmask``: the program `flexmask`."""

from flexmask.commands.main import main

if __name__ == "__main__":
    main()
