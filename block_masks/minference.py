"""MInference's vertical-slash index with budgets per head, in whole blocks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from flexmask.base.head_groups import map_bytes
from flexmask.base.inputs import AttentionInputs
from flexmask.base.scores import ranks
from flexmask.base.visibility import by_distance, candidate_lines, split_into_blocks
from flexmask.mask_function import BlockProblem, Method, PairsByHead, choice_option, mask_function
from flexmask.plain import blocks_on_lines, line_mass, representative_attention, representative_rows

LAST_ROWS = 64
SINK_TOKENS = 30
NEAR_OFFSETS = 100


@dataclass(frozen=True, eq=False)
class MInference(Method):
    """MInference's vertical-slash pattern at the granularity of blocks, with a budget per head.

    With p the softmax attention of the last 64 valid rows, a key scores its column's sum and an offset ``position - k`` its
    diagonal's sum; the first 30 valid keys and the offsets 0 to 99 come first. A head's plan (V, S) says how many of each are
    kept. ``lines="pooled"`` keeps the ``ceil(V / block_size)`` key blocks and ``ceil(S / block_size)`` block diagonals with the
    largest pooled sums. ``lines="covering"`` keeps every block that one of the V keys or S offsets touches.
    The other parameters, the result and the errors are as in `flexprefill_mask`.

    Source: MInference (https://arxiv.org/abs/2407.02490), section 3.2, algorithm "Vertical-Slash Head".

    Differs from the paper: its kernel reads single columns. "pooled" is a coarser mask of the same budget, whose slashes count
    for both block diagonals that they cross; "covering" is a superset, nearly dense where columns scatter. The paper's other
    patterns are `tri_shape_mask` and `streaming_llm_mask` (A-shape). Short prompts do not run dense.

    Parameters
    ----------
    plan
        Tokens (V, S), each >= 0: a pair for all heads, or one per query head, as the offline search writes them for a layer. V is
        at least 30 and S at least 50, as in the published code. Default (1000, 6096), the published code's without a plan.
    lines
        ``"pooled"`` (default) or ``"covering"``; both are ours.

    Examples
    --------
    >>> import torch
    >>> query, key = torch.randn(1, 4, 512, 64), torch.randn(1, 2, 512, 64)
    >>> minference_mask(query, key, block_size=64, plan=(64, 64)).to_dense()[0, 0, 4:6]
    tensor([[1, 0, 0, 0, 1, 0, 0, 0],
            [1, 0, 0, 0, 0, 1, 0, 0]], dtype=torch.int32)
    """

    plan: PairsByHead = (1000, 6096)
    lines: str = choice_option("pooled", "covering")

    def select(self, problem: BlockProblem) -> Tensor:
        inputs, size, tokens = problem.inputs, problem.block_size, problem.tokens
        rows = representative_rows("last", tokens, LAST_ROWS)
        attention = representative_attention(inputs, rows, tokens)
        pairs = problem.as_tensor(self.plan)  # (num_heads or 1, 2)
        count = torch.stack([pairs[:, 0].clamp(min=SINK_TOKENS), pairs[:, 1].clamp(min=NEAR_OFFSETS // 2)])[:, None, :, None]
        if self.lines == "pooled":
            mass = line_mass(attention, rows, size)
            near = problem.kv_block < -(-NEAR_OFFSETS // size)
            vertical = mass.vertical.masked_fill(problem.blocks_of_first_tokens(SINK_TOKENS)[:, 0], float("inf"))
            values = torch.stack([vertical, mass.slash.masked_fill(near, float("inf"))])
            candidates = candidate_lines(problem.visibility).unsqueeze(2)
            kept = ranks(values, candidates) < (count / size).ceil()
            return blocks_on_lines(kept[0], kept[1], problem.visibility)
        attention = torch.where(rows.valid[:, None, :, None], attention, 0.0)
        # by key and by offset, (batch, num_heads, kv_len)
        columns, offsets = attention.sum(2), by_distance(attention, rows.position[:, None]).sum(2)
        valid = tokens.key_valid[:, None]
        ordinal = valid.cumsum(-1)
        columns = columns.masked_fill(valid & (ordinal <= SINK_TOKENS), float("inf"))
        offset = torch.arange(offsets.shape[-1], device=offsets.device)
        offsets = offsets.masked_fill(offset < NEAR_OFFSETS, float("inf"))
        keys = split_into_blocks(ranks(columns, valid) < count[0], size).any(-1)
        slashes = split_into_blocks(ranks(offsets, torch.ones_like(valid)) < count[1], size)
        # an offset between two multiples of the block crosses two block diagonals
        crossing = slashes[..., 1:].any(-1)
        diagonals = slashes.any(-1) | torch.cat([torch.zeros_like(crossing[..., :1]), crossing[..., :-1]], -1)
        return blocks_on_lines(keys, diagonals, problem.visibility)

    def selection_bytes(self, inputs: AttentionInputs, by_kernels: bool) -> int:
        return map_bytes(inputs, self.block_size, LAST_ROWS)


minference_mask = mask_function("minference", MInference)
