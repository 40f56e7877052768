"""The algorithm again in plain loops and float64, for the tests; imports nothing else of flexmask."""
