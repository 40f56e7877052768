"""The lines of hybrid selection: key blocks and block diagonals that the representative rows attend to."""

from __future__ import annotations

import torch
from torch import Tensor

from flexmask.base.blocks import BlockProblem
from flexmask.base.visibility import candidate_lines
from flexmask.plain.representative import RepresentativeMass
from flexmask.plain.vertical_slash import Lines, RowMass, line_mass, row_mass


def last_rows_lines(problem: BlockProblem, last: RepresentativeMass, thresholds: Tensor, near: int) -> Lines:
    """Key blocks and block diagonals that the representative rows keep.

    Key blocks to which a row gives at least its threshold; block diagonals to which the rows give at least theirs on average,
    without attention to kept key blocks beyond a row's `near` nearest. `thresholds` is (2, batch or 1, num_heads), of key blocks
    and of diagonals; NaN reaches them.
    """
    in_vertical, in_slash = candidate_lines(problem.tokens, problem.block_size, problem.inputs.window).unsqueeze(2).unbind(0)
    rows, (of_key_block, of_diagonal) = last.rows, thresholds.unbind(0)
    most = torch.where(rows.taken[:, None, :, None], last.mass.by_row, 0.0).amax(2)
    vertical = ~(most < of_key_block.float().unsqueeze(-1)) & in_vertical

    own_block = rows.position // problem.block_size
    far = own_block.unsqueeze(-1) - torch.arange(most.shape[-1], device=most.device) >= near
    held = vertical.unsqueeze(2) & far[:, None]
    rest = (torch.where(held, 0.0, sums) for sums in row_mass(last.attention, rows, problem.block_size))
    left = line_mass(RowMass(*rest), rows, problem.block_size).slash
    slash = ~(left < of_diagonal.float().unsqueeze(-1)) & in_slash
    return Lines(vertical, slash, torch.stack([vertical.sum(-1), slash.sum(-1)]))
