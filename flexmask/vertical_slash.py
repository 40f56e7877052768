"""The vertical-slash index: which key blocks and block diagonals a head keeps (the paper's "Vertical Slash Index Search")."""

from __future__ import annotations

import torch
from torch import Tensor

from flexmask.selection import fewest_reaching
from flexmask.visibility import BlockVisibility, Tokens, block_visibility, num_blocks


def candidate_lines(tokens: Tokens, block_size: int, window: int | None) -> Tensor:
    """Key blocks, then block diagonals, that hold a visible block, (2, batch or 1, num_kv_blocks) bool."""
    if tokens.padded or window is not None:
        seen = block_visibility(tokens, block_size, window)
        return torch.stack([seen.visible.any(-2), candidate_diagonals(seen)])
    # the last row sees every filled key, and the first key lies as far before it as can be
    block = torch.arange(num_blocks(tokens.key_valid.shape[1], block_size), device=tokens.offset.device)
    filled = block * block_size < tokens.offset.unsqueeze(-1) + tokens.row_valid.shape[1]
    return filled.expand(2, *filled.shape)


def candidate_diagonals(seen: BlockVisibility) -> Tensor:
    """Block diagonals that hold a visible block, (batch or 1, num_kv_blocks) bool."""
    visible = seen.visible
    diagonal = torch.arange(visible.shape[-1], device=visible.device)
    holds = torch.zeros_like(visible[:, 0])
    for row_diagonal in (seen.first_diagonal, seen.last_diagonal):
        kv_block = row_diagonal.unsqueeze(-1) - diagonal
        on_diagonal = visible.gather(-1, kv_block.clamp(min=0).expand(visible.shape)) & (kv_block >= 0)
        holds = holds | on_diagonal.any(-2)
    return holds


def line_counts(
    values: Tensor, candidates: Tensor, gamma: Tensor | None, min_blocks: int, max_blocks: int | None
) -> tuple[Tensor, Tensor]:
    """How many lines of one family a vertical-slash head keeps, and a query-aware head (its floor).

    Parameters
    ----------
    values
        (batch, num_heads, num_lines) float32: V by key block or S by block diagonal.
    candidates
        (batch or 1, 1, num_lines) bool.
    gamma
        0-d float64, or None for gamma = 1, which keeps every candidate without summing.
    min_blocks, max_blocks
        Floor and cap, in lines; the floor comes last. Both end at the number of candidates.

    Returns
    -------
    tuple of Tensor
        Two (batch or 1, num_heads or 1) int64 counts.
    """
    available = candidates.sum(-1)
    count = available if gamma is None else fewest_reaching(values, candidates, gamma)
    if max_blocks is not None:
        count = count.clamp(max=max_blocks)
    floor = available.clamp(max=min_blocks)
    return torch.maximum(count, floor), floor


def extended_lines(vertical: Tensor, slash: Tensor, seen: BlockVisibility) -> Tensor:
    """Extend kept key blocks and block diagonals over the whole map.

    `vertical` and `slash` are (batch, num_heads, num_kv_blocks) bool; the result is (batch, num_heads, num_q_blocks,
    num_kv_blocks), not yet limited to visible blocks. A query block whose rows stand in two key blocks lies on two diagonals.
    """
    kv_block = torch.arange(vertical.shape[-1], device=vertical.device)
    kept = vertical.unsqueeze(-2)
    for row_diagonal in (seen.first_diagonal, seen.last_diagonal):
        diagonal = row_diagonal.unsqueeze(-1) - kv_block
        index = diagonal.clamp(min=0)[:, None].expand(*slash.shape[:2], -1, -1)
        on_diagonal = slash.unsqueeze(-2).expand(index.shape).gather(-1, index)
        kept = kept | (on_diagonal & (diagonal >= 0)[:, None])
    return kept


def blocks_kept_always(seen: BlockVisibility) -> Tensor:
    """First visible key block and the diagonal blocks of every query block, (batch or 1, num_q_blocks, num_kv_blocks) bool."""
    kv_block = torch.arange(seen.visible.shape[-1], device=seen.visible.device)
    first = seen.visible.int().argmax(-1, keepdim=True)
    kept = (kv_block == first) | (kv_block == seen.first_diagonal.unsqueeze(-1))
    return seen.visible & (kept | (kv_block == seen.last_diagonal.unsqueeze(-1)))
