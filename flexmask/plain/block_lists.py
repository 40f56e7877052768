"""From kept lines and blocks to the index lists of a BlockMask."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from flexmask.base.blocks import BlockProblem
from flexmask.base.selection import BlockLists, block_lists
from flexmask.plain.representative import RepresentativeMass
from flexmask.plain.vertical_slash import Lines, blocks_kept_always, extended_lines


class Blocks(NamedTuple):
    """Blocks that rows choose, (batch, num_heads, num_q_blocks, num_kv_blocks) bool."""

    chosen: Tensor
    lines: Tensor | None = None  # where lines count


def kept_blocks(
    problem: BlockProblem,
    lines: Lines,
    blocks: Blocks | None,
    last: RepresentativeMass | None = None,
    nearest: tuple[int, int] = (0, 0),
) -> tuple[BlockLists, Tensor]:
    """Steps 4 and 5: the lists of the kept lines and `blocks` with the blocks kept always, and the map of kept blocks.

    Every query block keeps its ``nearest[0]`` nearest blocks; those with rows of `last` keep ``nearest[1]`` and all lines.
    """
    seen = problem.seen
    keep, always = extended_lines(lines.vertical, lines.slash, seen), blocks_kept_always(seen)
    if last is not None:
        holds = _holds_rows(problem, last)
        # of two diagonals, the nearer
        distance = seen.first_diagonal.unsqueeze(-1) - torch.arange(keep.shape[-1], device=keep.device)
        always = always | (distance < torch.where(holds, nearest[1], nearest[0]))
        if blocks is not None and blocks.lines is not None:
            keep = keep & (blocks.lines | holds[:, None])
    if blocks is not None:
        keep = keep | blocks.chosen
    keep = (keep | always[:, None]) & seen.visible[:, None]
    return block_lists(keep, seen.full), keep


def _holds_rows(problem: BlockProblem, last: RepresentativeMass) -> Tensor:
    """The query blocks that hold rows of `last`, (batch or 1, num_q_blocks, 1)."""
    rows = last.rows
    q_block = torch.arange(problem.seen.visible.shape[1], device=rows.row.device)
    holds = ((rows.row // problem.block_size).unsqueeze(1) == q_block.unsqueeze(-1)) & rows.taken.unsqueeze(1)
    return holds.any(-1, keepdim=True)
