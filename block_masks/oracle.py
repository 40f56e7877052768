"""The quadratic oracle: the blocks that hold the most true attention of each query block."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from flexmask.base.scores import capped, grouped_scores, masked_softmax, top_p
from flexmask.base.visibility import split_into_blocks, visible_keys
from flexmask.mask_function import BlockProblem, Method, mask_function, share_option


@dataclass(frozen=True, eq=False)
class Oracle(Method):
    """The fewest blocks of each query block that hold a share of its true attention; for measuring only.

    ``M[i, j]`` is the softmax attention to block j, averaged over the valid rows of query block i, which keeps the fewest j,
    heaviest first, that reach `gamma` times the sum of its row. Slower than dense attention. No selection holds more attention in
    as few blocks, yet its outputs need not be the best: see `block_masks/README.md`.
    The other parameters, the result and the errors are as in `flexprefill_mask`.

    Source: none; the mass that the other methods estimate.

    Parameters
    ----------
    gamma
        Share of the attention that the kept blocks hold. Range (0, 1]; 1 keeps every visible block. Default 0.95 (flexprefill's).

    Examples
    --------
    >>> import torch
    >>> query, key = torch.randn(1, 4, 512, 64), torch.randn(1, 2, 512, 64)
    >>> mask = oracle_mask(query, key, block_size=64, gamma=0.5)
    >>> bool((mask.to_dense().sum(-1)[..., -1] < 8).all())
    True
    """

    gamma: float = share_option(0.95)

    def select(self, problem: BlockProblem) -> Tensor:
        inputs, size, tokens = problem.inputs, problem.block_size, problem.tokens
        visible = visible_keys(tokens.position, tokens.row_valid, tokens, inputs.window)[:, None]
        scores = capped(grouped_scores(inputs.query, inputs.key) * inputs.scale, inputs.softcap)
        attention = torch.where(visible, masked_softmax(scores, visible), 0.0)
        mass = split_into_blocks(split_into_blocks(attention, size).sum(-1).mT, size).sum(-1).mT
        return top_p(mass, problem.visible, problem.as_tensor(self.gamma))

    def floats_per_row(self, kv_len: int) -> int:
        return kv_len


oracle_mask = mask_function("oracle", Oracle)
