"""The pattern of each head: query-aware or vertical-slash (the paper's algorithm "Sparse Pattern Search")."""

from __future__ import annotations

import torch
from torch import Tensor


def jensen_shannon_distance(estimated: Tensor, true: Tensor) -> Tensor:
    """Square root of the Jensen-Shannon divergence of two distributions over the last dimension (the paper's D_JS).

    Natural logarithms and 0 * log 0 = 0, so it lies in [0, sqrt(ln 2)] up to rounding. NaN in either gives NaN.

    Differs from the paper's published code: there a probability that underflows to 0 gives NaN.
    """
    middle = (estimated + true) / 2
    divergence = (_relative_entropy(estimated, middle) + _relative_entropy(true, middle)) / 2
    return divergence.clamp(min=0).sqrt()


def _relative_entropy(p: Tensor, q: Tensor) -> Tensor:
    return torch.where(p == 0, 0.0, p * (p / torch.where(p == 0, 1.0, q)).log()).sum(-1)
