"""Row coverage of a head: the evidence that kept blocks hold, over its query blocks."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from flexmask.base.blocks import BlockProblem


def mean_and_least(problem: BlockProblem, held: Tensor, has_rows: Tensor) -> tuple[Tensor, Tensor]:
    """Over the query blocks of `has_rows`, (batch, num_heads, num_q_blocks)."""
    number = has_rows.sum(-1)
    mean = torch.where(has_rows, held, 0.0).sum(-1) / number
    # amin keeps NaN
    least = torch.where(number > 0, torch.where(has_rows, held, math.inf).amin(-1), math.nan)
    is_absent = ~problem.tokens.row_valid.any(-1, keepdim=True)
    return torch.where(is_absent, 0.0, mean), torch.where(is_absent, 0.0, least)
