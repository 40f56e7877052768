"""SpargeAttn's first stage: pooled scores where blocks are self-similar, everything where they are not."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from flexmask.base.scores import block_means, capped, grouped_scores, masked_softmax, running_sums
from flexmask.mask_function import BlockProblem, Method, mask_function, share_option


@dataclass(frozen=True, eq=False)
class Sparge(Method):
    """SpargeAttn's first stage: top-p over pooled scores; blocks that are not self-similar are kept whole.

    A block is self-similar iff the mean cosine of all pairs of its tokens exceeds `similarity_threshold`; the mean key is
    subtracted from keys first. With ::

        A = softmax over self-similar, visible j of score(mean(Q_i), mean(K_j))

    query block i keeps the heaviest j while their running sum stays at or under `cdf_threshold` (at least one), and every key
    block that is not self-similar; a query block that is not self-similar keeps all.
    The other parameters, the result and the errors are as in `flexprefill_mask`.

    Source: SpargeAttn (https://arxiv.org/abs/2502.18137), selective token compression for sparse prediction.

    Differs from the paper: the second stage, inside the kernel, and the quantised products are left out. Key blocks are as long
    as query blocks (published: 64 keys to 128 rows). Each row's own block is kept. The mean key is that of all valid keys, hence
    another in each chunk.

    Parameters
    ----------
    similarity_threshold
        Mean cosine above which a block is self-similar. Range [-1, 1]; -1: all are. Default 0.6 (published interface with
        cdf_threshold; -0.1 in that with topk).
    cdf_threshold
        Share of the pooled attention that the kept blocks stay within. Range (0, 1]. Default 0.98 (as above).
    topk
        Share of the key blocks with a token, later ones included, that each query block keeps, instead of `cdf_threshold`. Range
        (0, 1], or None (default); 0.5 in the published interface that its authors recommend.

    Examples
    --------
    >>> import torch
    >>> query, key = torch.randn(1, 4, 512, 64), torch.randn(1, 2, 512, 64)
    >>> mask = sparge_mask(query, key, block_size=64, similarity_threshold=-1.0, topk=0.25)
    >>> bool((mask.to_dense().sum(-1) <= 3).all())  # two of eight, and the own block
    True
    """

    similarity_threshold: float = share_option(0.6, "[-1, 1]")
    cdf_threshold: float = share_option(0.98)
    topk: float | None = share_option(None)

    def select(self, problem: BlockProblem) -> Tensor:
        inputs, size, tokens = problem.inputs, problem.block_size, problem.tokens
        key_valid, counts = tokens.key_valid, problem.key_counts()
        present = inputs.key.float().masked_fill(~key_valid[:, None, :, None], 0)
        centre = present.sum(2, keepdim=True) / key_valid.sum(-1).clamp(min=1)[:, None, None, None]
        threshold = problem.as_tensor(self.similarity_threshold)
        keys_alike = _similarity(inputs.key.float() - centre, key_valid, size) > threshold
        rows_alike = _similarity(inputs.query.float(), tokens.row_valid, size) > threshold
        queries_per_kv = inputs.query.shape[1] // inputs.key.shape[1]
        keys_alike = keys_alike.repeat_interleave(queries_per_kv, 1).unsqueeze(-2)  # (batch, num_heads, 1, num_kv_blocks)

        scores = capped(grouped_scores(problem.query_means() * inputs.scale, problem.key_means()), inputs.softcap)
        candidates = problem.visible & keys_alike & (counts > 0)[:, None, None]
        attention = torch.where(candidates, masked_softmax(scores, candidates), 0.0).nan_to_num(0.0)
        order = torch.where(candidates, attention, -1.0).sort(dim=-1, descending=True, stable=True).indices
        if self.topk is None:
            limit = problem.as_tensor(self.cdf_threshold)
            # at 1 rounding must not decide
            within = (running_sums(attention.gather(-1, order), limit.dtype) <= limit) | (limit >= 1)
        else:
            limit = problem.as_tensor(self.topk)
            within = problem.kv_block < (limit * (counts > 0).sum(-1)).floor()[:, None, None, None]
        within = within | (problem.kv_block == 0)
        chosen = torch.zeros_like(candidates.expand(order.shape)).scatter(-1, order, within.expand(order.shape))
        return (chosen & candidates) | ~keys_alike | ~rows_alike.unsqueeze(-1)

    def floats_per_row(self, kv_len: int) -> int:
        return max(1, 8 * kv_len // self.block_size**2)


sparge_mask = mask_function("sparge", Sparge)


def _similarity(x: Tensor, valid: Tensor, size: int) -> Tensor:
    """Mean cosine of all pairs of a block's valid tokens: the mean unit vector's squared norm; (batch, heads, blocks) float32."""
    units = x / x.norm(dim=-1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny)
    return block_means(units, valid, size).square().sum(-1)
