"""The loss of each block mask: test beds, methods and the measure."""
