"""The fewest candidates whose attention reaches gamma (the paper's "Cumulative-Attention Based Index Selection")."""

from __future__ import annotations

import torch
from torch import Tensor

from flexmask._torch import HAS_TRITON

if HAS_TRITON:
    from flexmask.triton_threshold import threshold


def ranks(values: Tensor, candidates: Tensor) -> Tensor:
    """Place of every entry in descending order over the last dimension, int64 from 0.

    Equal values rank by lower index; entries that are no candidates rank after all that are. Values must be >= 0.
    """
    order = torch.where(candidates, values, -1.0).sort(dim=-1, descending=True, stable=True).indices
    return torch.zeros_like(order).scatter(-1, order, torch.arange(order.shape[-1], device=order.device).expand_as(order))


def fewest_reaching(values: Tensor, candidates: Tensor, gamma: Tensor) -> Tensor:
    """How many of the heaviest candidates it takes for their sum to reach gamma times the sum of all candidates.

    `values` (..., n) float32 >= 0, `candidates` bool, `gamma` 0-d float64. Returns (...,) int64; sums are float64.
    """
    ordered = torch.where(candidates, values, 0.0).sort(dim=-1, descending=True).values.double()
    running = ordered.cumsum(-1)
    return (running - ordered < gamma * running[..., -1:]).sum(-1)


def heaviest_covering(values: Tensor, candidates: Tensor, gamma: Tensor) -> Tensor:
    """The fewest candidates whose sum reaches gamma times the sum of all, as a bool tensor.

    Parameters
    ----------
    values
        (..., n) float32 >= 0; NaN counts as 0.
    candidates
        Bool, broadcasts to it.
    gamma
        0-d float64. Sums are float64: a running float32 sum over a large map never reaches .99 of its total.
    """
    values = torch.where(candidates, values.nan_to_num(0.0), -1.0)
    ordered, order = values.sort(dim=-1, descending=True, stable=True)
    weights = ordered.clamp(min=0).double()
    running = weights.cumsum(-1)
    kept = (running - weights < gamma * running[..., -1:]) & (ordered >= 0)
    return torch.zeros_like(kept).scatter(-1, order, kept)


def covering_map(values: Tensor, candidates: Tensor, gamma: Tensor, active: Tensor) -> Tensor:
    """`heaviest_covering` of each head's flattened map, False in heads that are not active.

    `values` is (batch, num_heads, rows, columns), `candidates` broadcasts to it, `active` is (batch, num_heads) bool.
    """
    kept = heaviest_covering(values.flatten(2), candidates.flatten(2), gamma).unflatten(2, values.shape[2:])
    return kept & active[..., None, None]


def fused_covering_map(values: Tensor, candidates: Tensor, gamma: Tensor, active: Tensor) -> Tensor:
    """`covering_map` without a sort, by Triton kernels that skip heads that are not active (CUDA only).

    They find the smallest kept value; entries equal to it are kept from the lower flattened index on, as many as it takes.
    """
    values = torch.where(candidates & ~values.isnan(), values, 0.0)
    bits, goal = threshold(values.flatten(0, 1).flatten(1), active.flatten(), gamma)
    smallest = bits.view(torch.float32).double().view_as(active)
    bits = bits.view(*active.shape, 1, 1)
    above = values.view(torch.int32) > bits
    held = torch.where(above, values, 0.0).sum(-1).double().sum(-1)
    missing = torch.ceil((goal.view_as(active) - held) / smallest).clamp(min=1)
    missing = torch.where(smallest > 0, missing, float("inf"))[..., None, None]
    tied = (values.view(torch.int32) == bits) & candidates
    in_row = tied.sum(-1, keepdim=True)
    place = tied.cumsum(-1) - 1 + in_row.cumsum(-2) - in_row
    return (above | (tied & (place < missing))) & active[..., None, None]
