"""The pictures of `flexmask.plot`; matplotlib is imported when something is drawn."""
