"""Row evidence: the attention of all query rows to the means of the key blocks, by query block (hybrid selection).

FlexPrefill's representative rows stand at the end of the prompt. What earlier rows attend to is estimated here: exactly on the
side of the queries, by block means on the side of the keys, which costs ``1 / (block_size * row_stride)`` of the attention.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from flexmask.base.inputs import AttentionInputs
from flexmask.base.scores import masked_softmax
from flexmask.base.visibility import Tokens, blocks_seen_by_rows, in_blocks, whole_blocks
from flexmask.plain.pooling import pooled_scores


class RowEvidence(NamedTuple):
    """Attention of the rows asked to the means of the key blocks, (batch, num_heads, num_q_blocks, num_kv_blocks) float32.

    Both are 0 in query blocks of which no row is asked.
    """

    root_mean_square: Tensor  # R: over the rows of a query block
    mean: Tensor


def row_evidence(
    inputs: AttentionInputs, key_means: Tensor, key_counts: Tensor, tokens: Tokens, block_size: int, row_stride: int
) -> RowEvidence:
    """The attention of every `row_stride`-th valid row of each query block to the means of the key blocks it sees.

    The rows are those at a multiple of `row_stride` from the start of their block. It goes through them one row of every block at
    a time, so that the scores take no more memory than the result.

    Parameters
    ----------
    inputs
        A placed problem.
    key_means
        (batch, num_kv_heads, num_kv_blocks, head_dim) float32.
    key_counts
        (batch or 1, num_kv_blocks) integer: valid keys.
    """
    query = whole_blocks(inputs.query, 2, block_size)
    valid = in_blocks(tokens.row_valid, block_size, False)
    first_row = tokens.offset.unsqueeze(-1) + torch.arange(valid.shape[1], device=query.device) * block_size
    asked = valid[..., ::row_stride].sum(-1).clamp(min=1)[:, None, :, None]
    shape = (*query.shape[:3], key_means.shape[2])
    mean, square = (torch.zeros(shape, dtype=torch.float32, device=query.device) for _ in range(2))
    for slot in range(0, block_size, row_stride):
        taken = valid[..., slot]
        rows = query[:, :, :, slot].float().masked_fill(~taken[:, None, :, None], 0)
        sees = (blocks_seen_by_rows(first_row + slot, tokens, block_size, inputs.window) & taken.unsqueeze(-1))[:, None]
        scores = pooled_scores(rows, key_means, key_counts, inputs.scale, inputs.softcap)
        share = torch.where(sees, masked_softmax(scores, sees), 0.0)
        mean = mean + share
        square = square + share * share
    return RowEvidence((square / asked).sqrt(), mean / asked)
