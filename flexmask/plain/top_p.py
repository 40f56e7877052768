"""The fewest candidates whose attention reaches gamma (the paper's "Cumulative-Attention Based Index Selection")."""

from __future__ import annotations

import torch
from torch import Tensor

from flexmask.base.floats import running_sums


def ranks(values: Tensor, candidates: Tensor) -> Tensor:
    """Rank of every entry >= 0 in descending order over the last dimension, int64 from 0.

    Equal values rank by lower index, candidates before all others.
    """
    order = torch.where(candidates, values, -1.0).sort(dim=-1, descending=True, stable=True).indices
    return torch.zeros_like(order).scatter(-1, order, torch.arange(order.shape[-1], device=order.device).expand_as(order))


def top_p_count(values: Tensor, candidates: Tensor, gamma: Tensor) -> Tensor:
    """Count the heaviest candidates whose sum reaches gamma times the sum of all candidates; every candidate at gamma 1."""
    ordered = torch.where(candidates, values, 0.0).sort(dim=-1, descending=True).values
    running = running_sums(ordered, gamma.dtype)
    count = (running - ordered < gamma.unsqueeze(-1) * running[..., -1:]).sum(-1)
    # at 1 neither rounding nor weightless candidates may decide
    return torch.where(gamma >= 1, candidates.sum(-1), count)


def top_p(values: Tensor, candidates: Tensor, gamma: Tensor, forced: Tensor | None = None) -> Tensor:
    """The fewest candidates whose sum reaches gamma times the sum of all, as a bool tensor; every candidate at gamma 1.

    `values` is (..., n) float32 >= 0, NaN counts as 0; `gamma` broadcasts to (...,), in the sums' dtype. `forced` candidates are
    kept in any case and count first.
    """
    values = torch.where(candidates, values.nan_to_num(0.0), 0.0)
    first = values if forced is None else torch.where(forced, float("inf"), values)
    order = torch.where(candidates, first, -1.0).sort(dim=-1, descending=True, stable=True).indices
    weights = values.gather(-1, order)
    running = running_sums(weights, gamma.dtype)
    gamma = gamma.unsqueeze(-1)
    kept = (running - weights < gamma * running[..., -1:]) | (gamma >= 1)
    kept = torch.zeros_like(kept).scatter(-1, order, kept)
    return (kept if forced is None else kept | forced) & candidates
