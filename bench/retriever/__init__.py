"""A small Llama model that was trained to retrieve, and everything that made it."""
