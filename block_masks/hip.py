"""HiP attention with its hierarchical descent stopped at blocks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from flexmask.base.scores import capped, grouped_scores
from flexmask.base.visibility import split_into_blocks
from flexmask.mask_function import BlockProblem, Method, count_option, mask_function


@dataclass(frozen=True, eq=False)
class Hip(Method):
    """HiP-block: HiP's hierarchical top-k descent over each row's keys, stopped at single blocks.

    Keeps sinks and window. The key blocks between them are cut into k = `topk_blocks` chunks; every chunk is halved and the best
    k halves stay, until each is one block. A chunk's score is the largest of the middle valid key of its middle block with every
    `query_stride`-th row of the query block. Of equal scores the earlier half wins.
    The other parameters, the result and the errors are as in `flexprefill_mask`.

    Source: HiP (https://arxiv.org/abs/2406.09827), algorithm "Mask estimation".

    Differs from the paper: its descent goes on to chunks of two keys; here k whole blocks are kept. All representative keys are
    scored at once, at a cost of rows times blocks instead of n log n.

    Parameters
    ----------
    topk_blocks
        Blocks, >= 1, per query block that the descent ends with. Default 16 (2048 tokens in blocks of 128: the second version's
        last stage).
    sink_blocks
        Blocks, >= 0. Default 2 (256 tokens, second version).
    window_blocks
        Blocks, >= 1, the row's own included. Default 4 (512 tokens, second version).
    query_stride
        Rows, >= 1, a divisor of block_size: every query_stride-th row is scored. Default 2 (published code).

    Examples
    --------
    >>> import torch
    >>> query, key = torch.randn(1, 4, 512, 64), torch.randn(1, 2, 512, 64)
    >>> mask = hip_mask(query, key, block_size=64, topk_blocks=2, sink_blocks=1, window_blocks=1)
    >>> mask.to_dense()[0, 0].sum(-1)
    tensor([1, 2, 3, 4, 4, 4, 4, 4])
    """

    topk_blocks: int = count_option(16, 1)
    sink_blocks: int = count_option(2)
    window_blocks: int = count_option(4, 1)
    query_stride: int = count_option(2, 1, "rows")

    def select(self, problem: BlockProblem) -> Tensor:
        scores = _representative_scores(problem, self.query_stride)
        # the range between sinks and window, by query block: (batch or 1, 1, num_q_blocks, 1)
        first_seen = problem.visible.int().argmax(-1, keepdim=True)
        start = torch.maximum(problem.first_block() + self.sink_blocks, first_seen)
        end = (problem.visibility.first_row_block[:, None, :, None] - self.window_blocks + 1).clamp(min=0)
        length = (end - start).clamp(min=0)

        chunk = torch.arange(self.topk_blocks + 1, device=scores.device)
        bounds = start + chunk * length // self.topk_blocks
        bounds = bounds.expand(*scores.shape[:3], -1)
        low, high = bounds[..., :-1], bounds[..., 1:]
        halvings = 2
        # in steps of 4: every number of halvings is another compilation
        while self.topk_blocks << halvings < scores.shape[-1]:
            halvings += 4
        for _ in range(halvings):
            middle = (low + high) // 2
            # a chunk of one block has an empty left half; in order, for equal scores
            low = torch.stack([low, middle], -1).flatten(-2)
            high = torch.stack([middle, high], -1).flatten(-2)
            index = ((low + high - 1) // 2).clamp(0, scores.shape[-1] - 1)
            # empty halves sort last, even after chunks of padding, whose scores are finite
            sort_key = torch.where(low < high, scores.gather(-1, index), float("-inf"))
            best = sort_key.sort(dim=-1, descending=True, stable=True).indices[..., : self.topk_blocks].sort(dim=-1).values
            low, high = low.gather(-1, best), high.gather(-1, best)
        # an empty chunk marks one more column, which is cut off
        marked = torch.where(low < high, low, scores.shape[-1])
        chosen = torch.zeros(*scores.shape[:3], scores.shape[-1] + 1, dtype=torch.bool, device=scores.device)
        chosen = chosen.scatter(-1, marked, True)[..., :-1]
        return chosen | problem.first_blocks(self.sink_blocks) | problem.nearest_diagonals(self.window_blocks)

    def check(self) -> None:
        if self.block_size % self.query_stride != 0:
            raise ValueError(f"query_stride must divide block_size {self.block_size}; got {self.query_stride}")

    def floats_per_row(self, kv_len: int) -> int:
        return max(1, kv_len // self.block_size + 8 * self.topk_blocks // self.block_size)


hip_mask = mask_function("hip", Hip)


def _representative_scores(problem: BlockProblem, query_stride: int) -> Tensor:
    """Largest score of each key block's middle valid key, (batch, num_heads, num_q_blocks, num_kv_blocks) float32."""
    inputs, size, tokens = problem.inputs, problem.block_size, problem.tokens
    valid = split_into_blocks(tokens.key_valid, size)
    counts = valid.sum(-1, keepdim=True)
    middle = ((valid.cumsum(-1) == counts // 2 + 1) & valid).int().argmax(-1)  # (batch or 1, num_kv_blocks)
    index = (problem.kv_block * size + middle).clamp(max=inputs.key.shape[2] - 1)
    key = inputs.key.gather(2, index[:, None, :, None].expand(*inputs.key.shape[:2], -1, inputs.key.shape[3]))
    # (batch, num_heads, num_q_blocks * size / query_stride, head_dim)
    query = split_into_blocks(inputs.query, size, 2)[:, :, :, ::query_stride].flatten(2, 3).contiguous()
    rows = split_into_blocks(tokens.row_valid, size)[:, :, ::query_stride].flatten(1)
    scores = capped(grouped_scores(query, key) * inputs.scale, inputs.softcap)
    lowest = torch.finfo(scores.dtype).min
    scores = torch.where((rows.unsqueeze(-1) & (counts > 0).mT)[:, None], scores.nan_to_num(lowest), lowest)
    return scores.unflatten(2, (-1, size // query_stride)).amax(3)
