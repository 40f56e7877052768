"""InfLLM's memory units: sinks, a window, and a block lookup by groups of query blocks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from flexmask.base.scores import capped, grouped_scores, ranks
from flexmask.base.visibility import num_blocks
from flexmask.mask_function import BlockProblem, Method, count_option, mask_function


@dataclass(frozen=True, eq=False)
class InfLLM(Method):
    """InfLLM's block lookup without its positions: one choice for all heads, per group of query blocks.

    Groups of `execution_blocks` query blocks count from the call's first row. A group keeps the sinks, the blocks with a key
    less than `local_tokens` before its first row or later, and of the blocks in between the `topk_blocks` with the largest
    ``mean over heads of score(mean(Q_group), mean(K_j))``. All heads share one mask.
    The other parameters, the result and the errors are as in `flexprefill_mask`.

    Source: InfLLM (https://arxiv.org/abs/2402.04617), section 3, context memory and memory lookup.

    Differs from the paper: InfLLM gives all keys outside the window one distance, which a mask cannot; the lookup compares
    rotated queries and keys. A unit is represented by its mean key instead of the four keys with the most local attention.

    Parameters
    ----------
    topk_blocks
        Blocks, >= 0, that a group looks up. Default 16 (published setting for Llama-3).
    sink_blocks
        Blocks, >= 0, from the first valid key's on. Default 1 (128 tokens, as above).
    local_tokens
        Tokens, >= 1: reach of the window. Default 4096 (as above).
    execution_blocks
        Query blocks, >= 1, per group. Default 4 (512 tokens, as above).

    Examples
    --------
    >>> import torch
    >>> query, key = torch.randn(1, 4, 512, 64), torch.randn(1, 2, 512, 64)
    >>> infllm_mask(query, key, block_size=64, topk_blocks=1, local_tokens=64, execution_blocks=2).to_dense()[0, 0].sum(-1)
    tensor([1, 2, 3, 4, 4, 5, 4, 5])
    """

    heads_decide_together = True

    topk_blocks: int = count_option(16)
    sink_blocks: int = count_option(1)
    local_tokens: int = count_option(4096, 1, "tokens")
    execution_blocks: int = count_option(4, 1)

    def select(self, problem: BlockProblem) -> Tensor:
        inputs, size, tokens = problem.inputs, problem.block_size, problem.tokens
        # rows are filled up to whole groups
        blocks = min(self.execution_blocks, num_blocks(inputs.query.shape[2], size))
        # the window of a group's first row: (batch or 1, num_groups, num_kv_blocks)
        means = problem.query_means(blocks)
        first_row = tokens.offset.unsqueeze(-1) + blocks * size * torch.arange(means.shape[2], device=means.device)
        distance = first_row.unsqueeze(-1) - problem.last_keys().unsqueeze(-2)
        local = (distance < self.local_tokens)[:, None]
        sinks, has_keys = problem.first_blocks(self.sink_blocks), (problem.key_counts() > 0)[:, None, None]
        units = ~local & (distance < inputs.distance_limit)[:, None] & ~sinks & has_keys

        scores = capped(grouped_scores(means * inputs.scale, problem.key_means()), inputs.softcap)
        # ranks takes values >= 0; heads that are not finite do not count
        scores = scores.nan_to_num(0.0, 0.0, 0.0).mean(1, keepdim=True)
        chosen = (ranks(scores - scores.amin(-1, keepdim=True), units) < self.topk_blocks) & units
        kept = chosen | local | sinks
        return kept.repeat_interleave(blocks, 2)[:, :, : problem.visibility.visible.shape[1]]


infllm_mask = mask_function("infllm", InfLLM)
