"""What each block mask loses: test beds, methods and the measure."""
