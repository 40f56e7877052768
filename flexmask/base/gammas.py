"""Gammas by head: one share of the attention for each query head."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from flexmask._torch import widest_float
from flexmask.base.checks import check_plain

# keeps one block even where all of the largest map, of 8192 by 8192 blocks, weigh the same: a smaller gamma keeps no fewer
_LEAST = 2.0**-30


def gamma_by_head(gamma: Any, query: Tensor) -> tuple[float, ...] | Tensor | None:
    """Check a gamma by head against the heads of `query`; None for one number, which stays in the config.

    Parameters
    ----------
    gamma
        A number, a tuple that a config has checked, or a tensor.

    Returns
    -------
    tuple or Tensor or None
        The tuple; the tensor in `widest_float`, outside of autograd and clamped. NaN there counts as 1: blocks that were lost
        to it would show nowhere.

    Raises
    ------
    TypeError, ValueError
        For a tuple of another length, or a tensor of another shape, dtype or device. No value of a tensor is read.
    """
    num_heads = query.shape[1]
    if isinstance(gamma, Tensor):
        check_plain("gamma", gamma)
        if tuple(gamma.shape) != (num_heads,):
            raise ValueError(f"gamma must be (num_heads,) = ({num_heads},); got {tuple(gamma.shape)}")
        if not gamma.is_floating_point():
            raise TypeError(f"gamma must be floating; got {gamma.dtype}")
        if gamma.device != query.device:
            raise ValueError(f"gamma must be on query's device {query.device}; got {gamma.device}")
        return gamma.detach().to(widest_float(gamma.device)).nan_to_num(nan=1.0).clamp(_LEAST, 1.0)
    if not isinstance(gamma, tuple):
        return None
    if len(gamma) != num_heads:
        raise ValueError(f"gamma must hold one number for each of query's {num_heads} heads; got {len(gamma)} numbers")
    return gamma
