"""Shared by the plain steps and the kernels."""
