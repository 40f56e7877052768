"""Benchmarks and the demo; bench/README.md lists the commands."""

import torch

ON_GPU = torch.cuda.is_available()
