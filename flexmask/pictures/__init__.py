"""The pictures of `flexmask.plot`, one concept a file. Matplotlib is imported when something is drawn."""
