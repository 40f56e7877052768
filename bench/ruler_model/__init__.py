"""A trained model that answers RULER's task types, with its training."""
