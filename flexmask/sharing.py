"""One mask for the query heads that share a key head (``share_kv_heads``): what is joined over a group, and handed to each head.

Heads lie group by group, as in attention with grouped queries: head h belongs to key head ``h // groups``.
"""

from __future__ import annotations

from torch import Tensor


def group_mean(x: Tensor, groups: int, dim: int = 1) -> Tensor:
    """Mean over the `groups` heads of every key head; dimension `dim` shrinks from num_heads to num_kv_heads."""
    return x.unflatten(dim, (-1, groups)).mean(dim + 1)


def group_any(x: Tensor, groups: int, dim: int = 1) -> Tensor:
    """Whether some head of the group has it, of a bool tensor; dimension `dim` shrinks from num_heads to num_kv_heads."""
    return x.unflatten(dim, (-1, groups)).any(dim + 1)


def for_every_head(x: Tensor, groups: int, dim: int = 1) -> Tensor:
    """What was found for each key head, once for every head of its group; a copy."""
    return x.repeat_interleave(groups, dim)
