"""Benchmarks and the demo. The commands are the modules of this folder; the folders hold what they share."""

import torch

ON_GPU = torch.cuda.is_available()
