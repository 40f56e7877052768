"""A small trained Llama that retrieves needles: its task and its answers."""
