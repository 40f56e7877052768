"""Speed: masks, kernels and whole calls against dense attention, where the time and the memory go, and whole models."""
