"""Vertical-slash attention of a fixed budget: FlexPrefill's index with equally many lines in every head."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from flexmask.base.head_groups import map_bytes
from flexmask.base.inputs import AttentionInputs
from flexmask.base.scores import ranks
from flexmask.base.visibility import candidate_lines
from flexmask.mask_function import BlockProblem, Method, count_option, mask_function
from flexmask.plain import blocks_on_lines, representative_mass


@dataclass(frozen=True, eq=False)
class VerticalSlash(Method):
    """The heaviest key blocks and block diagonals of the last rows' attention, a fixed number of each in every head.

    With p the softmax attention of the last ``block_size`` valid rows, ``V[j]`` its mass on key block j and ``S[c]`` on block
    diagonal c (`docs/algorithm.md`): keeps the ``ceil(vertical_size / block_size)`` heaviest key blocks, the first valid key's
    always among them, and the ``ceil(slash_size / block_size)`` heaviest diagonals, the main one always among them.
    The other parameters, the result and the errors are as in `flexprefill_mask`.

    Source: FlexPrefill (https://arxiv.org/abs/2502.20766), section 4.3, "Fixed Budget vs. Dynamic Budget".

    Differs from the paper: a slash counts for both block diagonals that it crosses, in the published code for the nearer only;
    short prompts do not run dense.

    Parameters
    ----------
    vertical_size, slash_size
        Tokens, >= 0, of key blocks and of block diagonals. Default 8192 (published code).

    Examples
    --------
    >>> import torch
    >>> query, key = torch.randn(1, 4, 512, 64), torch.randn(1, 2, 512, 64)
    >>> vertical_slash_mask(query, key, block_size=64, vertical_size=64, slash_size=64).to_dense()[0, 0, 4:6]
    tensor([[1, 0, 0, 0, 1, 0, 0, 0],
            [1, 0, 0, 0, 0, 1, 0, 0]], dtype=torch.int32)
    """

    vertical_size: int = count_option(8192, 0, "tokens")
    slash_size: int = count_option(8192, 0, "tokens")

    def select(self, problem: BlockProblem) -> Tensor:
        size, mass = problem.block_size, representative_mass(problem, "last").lines
        candidates = candidate_lines(problem.visibility).unsqueeze(2)
        first, main = problem.first_blocks(1)[:, 0], problem.kv_block == 0
        lines = torch.stack([mass.vertical.masked_fill(first, float("inf")), mass.slash.masked_fill(main, float("inf"))])
        rank = ranks(lines, candidates)
        vertical = rank[0] < -(-self.vertical_size // size)
        slash = rank[1] < -(-self.slash_size // size)
        return blocks_on_lines(vertical, slash, problem.visibility)

    def selection_bytes(self, inputs: AttentionInputs, by_kernels: bool) -> int:
        return map_bytes(inputs, self.block_size, self.block_size)


vertical_slash_mask = mask_function("vertical_slash", VerticalSlash)
