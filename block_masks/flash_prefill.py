"""FlashPrefill: all rows against mean keys, and a threshold relative to the heaviest block."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from flexmask.base.scores import capped, grouped_scores
from flexmask.base.visibility import split_into_blocks
from flexmask.mask_function import BlockProblem, Method, count_option, mask_function, share_option


@dataclass(frozen=True, eq=False)
class FlashPrefill(Method):
    """FlashPrefill's mean-key scores, cut at a share of the heaviest block of each query block.

    With ::

        E[i, j] = sum over the rows t of query block i, at or past the last key of block j, of exp(score(q_t, mean(K_j)))

    query block i keeps key block j iff ``E[i, j] >= alpha * max over j of E[i, j]``, or ``j - first < sink_blocks``, or
    ``i - j < window_blocks``, or i is one of the last `last_blocks` query blocks with a valid row.
    The other parameters, the result and the errors are as in `flexprefill_mask`.

    Source: FlashPrefill (https://arxiv.org/abs/2603.06199), block scores and threshold, as its published code computes them.

    Differs from the paper: the second version's correction (https://arxiv.org/abs/2608.19758), a mean token per dropped block, is
    no mask. Means are rounded to the input's dtype as in the published code. In a chunk the last query blocks are the chunk's.

    Parameters
    ----------
    alpha
        Least share of the heaviest block's score. Range [0, 1]; 0 keeps every visible block. Default 0.1 (second version).
    sink_blocks
        Blocks, >= 0, from the first valid key's on. Default 2 (published code).
    window_blocks
        Blocks, >= 1, the row's own included. Default 4 (published code).
    last_blocks
        Query blocks, >= 0, that keep every visible block. Default 2 (first version; 8 in the second).

    Examples
    --------
    >>> import torch
    >>> query, key = torch.randn(1, 4, 512, 64), torch.randn(1, 2, 512, 64)
    >>> mask = flash_prefill_mask(query, key, block_size=64, alpha=1.0, sink_blocks=1, window_blocks=1, last_blocks=0)
    >>> bool((mask.to_dense().sum(-1) <= 3).all())  # the sink, the own block and the heaviest
    True
    """

    alpha: float = share_option(0.1, "[0, 1]")
    sink_blocks: int = count_option(2)
    window_blocks: int = count_option(4, 1)
    last_blocks: int = count_option(2)

    def select(self, problem: BlockProblem) -> Tensor:
        inputs, size, counts = problem.inputs, problem.block_size, problem.key_counts()
        scores = capped(grouped_scores(inputs.query, problem.key_means().to(inputs.query.dtype)) * inputs.scale, inputs.softcap)
        distance = problem.tokens.position.unsqueeze(-1) - problem.last_keys().unsqueeze(-2)  # (batch or 1, q_len, num_kv_blocks)
        in_reach = (distance >= 0) & (distance < inputs.distance_limit)
        sees = problem.tokens.row_valid.unsqueeze(-1) & (counts > 0).unsqueeze(-2) & in_reach
        scores = torch.where(sees[:, None], scores, torch.finfo(scores.dtype).min).mT
        # in logarithms: exponentials overflow; (batch, num_heads, num_q_blocks, num_kv_blocks)
        total = split_into_blocks(scores, size, fill=torch.finfo(scores.dtype).min).logsumexp(-1).mT
        seen = split_into_blocks(sees.mT, size).any(-1).mT[:, None]
        total = torch.where(seen, total, float("-inf"))
        alpha = problem.as_tensor(self.alpha)
        heavy = seen & (total >= total.amax(-1, keepdim=True) + alpha.log())
        kept = (
            problem.first_blocks(self.sink_blocks)
            | problem.nearest_diagonals(self.window_blocks)
            | problem.last_query_blocks(self.last_blocks)
        )
        return kept | heavy | (alpha == 0)

    def floats_per_row(self, kv_len: int) -> int:
        return max(1, kv_len // self.block_size)


flash_prefill_mask = mask_function("flash_prefill", FlashPrefill)
