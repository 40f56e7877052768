"""A small trained Llama that retrieves needles: task, training, evaluation."""
