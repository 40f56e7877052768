"""The program `flexmask`: one file a command, each a thin front of library code. ``main.py`` starts it, ``app.py`` lists them."""
