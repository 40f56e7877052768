"""XAttention: block scores from strided antidiagonals of the score map, then top-p by row."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from flexmask.base.scores import capped, grouped_scores, masked_softmax, top_p
from flexmask.base.visibility import split_into_blocks
from flexmask.mask_function import BlockProblem, Method, count_option, mask_function, share_option


@dataclass(frozen=True, eq=False)
class XAttention(Method):
    """XAttention's antidiagonal block scores, and the fewest blocks of each query block that reach a share of them.

    Rows and keys are cut into groups of s = `stride`. Each pair of groups (u, v) samples one antidiagonal of its s x s scores::

        a[u, v] = mean over t of score(row us + s-1-t, key vs + t),   v not after u
        A = softmax over v of a

    A block scores the sum of A over its tile. A query block keeps the first valid key's block, its own, and of the others the
    fewest, heaviest first, with which the sum reaches `threshold` times the sum of its row.
    The other parameters, the result and the errors are as in `flexprefill_mask`.

    Source: XAttention (https://arxiv.org/abs/2503.16428), section 2.

    Differs from the paper: the mean is over existing pairs, where the published code divides by s; its per-head thresholds for
    one model are left out. The sink is key column 0, as in the paper; the published flag forces query row 0.

    Parameters
    ----------
    stride
        Tokens, >= 1, a divisor of block_size: 1 / stride of the score map is computed. Default 8 (the paper's for accuracy; 16
        for speed).
    threshold
        Share of the sum of A over a query block's visible blocks that the kept ones hold. Range (0, 1]; 1 keeps every visible
        block. Default 0.9 (the paper's).

    Examples
    --------
    >>> import torch
    >>> query, key = torch.randn(1, 4, 512, 64), torch.randn(1, 2, 512, 64)
    >>> bool(xattention_mask(query, key, block_size=64, threshold=0.5).to_dense()[..., 0].all())  # the sink
    True
    """

    stride: int = count_option(8, 1, "tokens")
    threshold: float = share_option(0.9)

    def select(self, problem: BlockProblem) -> Tensor:
        inputs, tokens, size = problem.inputs, problem.tokens, problem.block_size
        row_valid = split_into_blocks(tokens.row_valid.float(), size, 1).flatten(1).unflatten(1, (-1, self.stride)).flip(2)
        key_valid = split_into_blocks(tokens.key_valid.float(), size, 1).flatten(1).unflatten(1, (-1, self.stride))
        pairs = row_valid @ key_valid.mT  # (batch or 1, row groups, key groups): pairs of tokens on each antidiagonal

        # groups as one long vector; padding must not count, NaN included
        query = inputs.query.masked_fill(~tokens.row_valid[:, None, :, None], 0)
        key = inputs.key.masked_fill(~tokens.key_valid[:, None, :, None], 0)
        query = split_into_blocks(query, size, 2).flatten(2, 3).unflatten(2, (-1, self.stride)).flip(3).flatten(3)
        key = split_into_blocks(key, size, 2).flatten(2, 3).unflatten(2, (-1, self.stride)).flatten(3)
        scores = capped(grouped_scores(query, key) * (inputs.scale / pairs.clamp(min=1))[:, None], inputs.softcap)

        first_row = tokens.offset.unsqueeze(-1) + self.stride * torch.arange(query.shape[2], device=query.device)
        # of the row group, in tokens
        distance = first_row.unsqueeze(-1) - self.stride * torch.arange(key.shape[2], device=key.device)
        visible = ((pairs > 0) & (distance > -self.stride) & (distance < inputs.distance_limit + self.stride - 1))[:, None]
        attention = torch.where(visible, masked_softmax(scores, visible), 0.0)
        tiles = attention.unflatten(3, (-1, size // self.stride)).sum(4).unflatten(2, (-1, size // self.stride)).sum(3)
        forced = problem.first_blocks(1) | problem.diagonal_blocks
        return top_p(tiles, problem.visible, problem.as_tensor(self.threshold), forced)

    def check(self) -> None:
        if self.block_size % self.stride != 0:
            raise ValueError(f"stride must divide block_size {self.block_size}; got {self.stride}")

    def floats_per_row(self, kv_len: int) -> int:
        return max(1, kv_len // self.stride**2)


xattention_mask = mask_function("xattention", XAttention)
