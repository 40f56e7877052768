"""Measurements: the clock, the methods that are compared, and one file for each kind of result."""
