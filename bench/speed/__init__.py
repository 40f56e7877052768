"""Speed of masks, kernels, calls and models against dense attention."""
