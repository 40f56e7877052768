"""What the plain steps and the kernels share."""
