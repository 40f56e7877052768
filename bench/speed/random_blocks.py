"""The method ``random_blocks``, for kernels and for models with random weights."""

from __future__ import annotations

import torch
from torch import Tensor

from flexmask.mask_function import BlockProblem, method


@method
def random_blocks_mask(problem: BlockProblem, density: float = 0.2) -> Tensor:
    """Keep about a share `density` of the visible blocks, plus the first and the row's own.

    A block's place decides, so chunks keep what the whole prompt keeps.
    """
    heads = torch.arange(problem.inputs.query.shape[1], device=problem.kv_block.device).view(1, -1, 1, 1)
    rows = problem.visibility.first_row_block[:, None, :, None].long()
    mixed = (heads + 1) * 73856093 + (rows + 1) * 19349663 + (problem.kv_block + 1) * 83492791
    for factor in (1274126177, 974634541):
        mixed = ((mixed ^ (mixed >> 15)) * factor) & 0xFFFFFFFF
    share = ((mixed ^ (mixed >> 13)) & 0xFFFFFF).double() / 2**24
    return (share < problem.as_tensor(density).double()) | problem.first_blocks(1)
