"""Top-p by row of blocks, some of which are kept in any case and count first."""

from __future__ import annotations

import torch
from torch import Tensor

from flexmask.base.running_sums import running_sums


def forced_top_p(values: Tensor, forced: Tensor, candidates: Tensor, gamma: Tensor) -> Tensor:
    """The forced candidates, and the fewest others with which the sum reaches gamma times the sum of all; bool.

    `values` is (..., n) float32 >= 0, NaN counts as 0; `forced` and `candidates`, bool, broadcast to it. `gamma` is 0-d, of the
    sums' dtype; 1 keeps every candidate. Of equal values the lower index goes first.
    """
    values = torch.where(candidates, values.nan_to_num(0.0), 0.0)
    rank_by = torch.where(candidates, torch.where(forced, float("inf"), values), -1.0)
    order = rank_by.sort(dim=-1, descending=True, stable=True).indices
    weights = values.gather(-1, order)
    running = running_sums(weights, gamma.dtype)
    kept = running - weights < gamma * running[..., -1:]
    kept = torch.zeros_like(kept).scatter(-1, order, kept)
    return (kept | forced | (gamma >= 1)) & candidates
