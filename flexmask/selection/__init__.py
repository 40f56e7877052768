"""One selection, from query and key to the kept blocks: `prepare`, then `select`, which runs the method (`run`, `operator`)."""
