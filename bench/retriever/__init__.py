"""A small Llama model trained to retrieve needles, with its task, training and evaluation."""
