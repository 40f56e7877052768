"""A trained model for RULER's task types."""
