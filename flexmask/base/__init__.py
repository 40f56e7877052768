"""Code that the plain steps and the kernels share."""
