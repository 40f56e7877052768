"""Key blocks and block diagonals that can be kept at all."""

from __future__ import annotations

import torch
from torch import Tensor

from flexmask.base.visibility import BlockVisibility, Tokens, block_visibility, num_blocks


def candidate_lines(tokens: Tokens, block_size: int, window: int | None) -> Tensor:
    """Key blocks, then block diagonals, that hold a visible block, (2, batch or 1, num_kv_blocks) bool."""
    if tokens.padded or window is not None:
        seen = block_visibility(tokens, block_size, window)
        return torch.stack([seen.visible.any(-2), candidate_diagonals(seen)])
    # the last row sees every filled key
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
