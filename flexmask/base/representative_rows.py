"""The representative query rows of a prompt (the paper's Q-hat)."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from flexmask.base.visibility import Tokens


class RepresentativeRows(NamedTuple):
    """Up to block_size query rows; batch is 1 where all batch rows agree."""

    row: Tensor  # (batch or 1, block_size) int64; 0 where not taken
    taken: Tensor  # (batch or 1, block_size) bool; False past the number of valid rows
    position: Tensor  # (batch or 1, block_size) int64


def representative_rows(which: str, tokens: Tokens, block_size: int) -> RepresentativeRows:
    """The last (or the middle) block_size valid query rows, adjacent or not; fewer if there are no more."""
    q_len = tokens.row_valid.shape[1]
    slot = torch.arange(block_size, device=tokens.offset.device)
    rank = tokens.row_valid.cumsum(-1) if tokens.padded else None  # (batch, q_len)
    num_valid = torch.full_like(tokens.offset, q_len) if rank is None else rank[:, -1]
    first = (num_valid - block_size).clamp(min=0)
    if which == "middle":
        first = first // 2
    ordinal = first.unsqueeze(-1) + slot
    taken = ordinal < num_valid.unsqueeze(-1)
    row = ordinal if rank is None else torch.searchsorted(rank, ordinal + 1)
    row = torch.where(taken, row, 0)
    return RepresentativeRows(row, taken, tokens.offset.unsqueeze(-1) + row)
