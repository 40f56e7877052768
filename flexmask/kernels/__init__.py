"""The same steps in Triton, under the same names."""
