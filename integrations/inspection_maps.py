"""The true attention of one head, pooled to blocks: what a mask is to be held against."""

from __future__ import annotations

import torch
from torch import Tensor

from flexmask._torch import without_autocast, without_tf32
from flexmask.base.inputs import AttentionInputs
from flexmask.base.scores import capped
from flexmask.base.visibility import in_blocks, num_blocks, token_validity

_MOST_SCORES = 2**24  # at once: 64 MiB in float32


def block_attention(inputs: AttentionInputs, block_size: int, most_scores: int = _MOST_SCORES) -> Tensor:
    """Attention of each query block's rows to each key block, the mean over its valid rows.

    Takes the time of dense attention. Scores are computed a few rows at a time, so that nothing larger than the block map and
    `most_scores` numbers is made, or one row's scores where these are more.

    Parameters
    ----------
    inputs
        One head of one batch row. Sinks take their part of the softmax: rows then sum to less than 1.
    block_size
        Tokens in a block.
    most_scores
        Scores that are computed at once.

    Returns
    -------
    Tensor
        (num_q_blocks, num_kv_blocks) float32 on the CPU; NaN in query blocks without a valid row.
    """
    with torch.no_grad(), without_autocast(inputs.query.device), without_tf32():
        query, key = inputs.query[0, 0].float(), inputs.key[0, 0].float()
        q_len, kv_len = query.shape[0], key.shape[0]
        tokens = token_validity(q_len, kv_len, inputs.offset, inputs.attention_mask, inputs.key)
        first, row_valid, key_valid = int(tokens.offset[0]), tokens.row_valid[0], tokens.key_valid[0]
        sums = torch.zeros((num_blocks(q_len, block_size), num_blocks(kv_len, block_size)), device=query.device)
        at_once = max(1, min(block_size, most_scores // kv_len))
        for block in range(sums.shape[0]):
            for start in range(block * block_size, min((block + 1) * block_size, q_len), at_once):
                rows = slice(start, min(start + at_once, (block + 1) * block_size, q_len))
                position = first + torch.arange(rows.start, rows.stop, device=query.device)[:, None]
                column = torch.arange(first + rows.stop, device=query.device)
                visible = key_valid[: first + rows.stop] & (column <= position) & row_valid[rows, None]
                if inputs.window is not None:
                    visible &= column > position - inputs.window
                scores = capped(query[rows] @ key[: first + rows.stop].mT * inputs.scale, inputs.softcap)
                weights = _softmax(scores.masked_fill_(~visible, -torch.inf), inputs.sinks)
                mass = in_blocks(weights.sum(0), block_size, 0.0).sum(-1)
                sums[block, : mass.shape[0]] += mass
        rows_of_block = in_blocks(row_valid.float(), block_size, 0.0).sum(-1, keepdim=True)
        return (sums / torch.where(rows_of_block > 0, rows_of_block, torch.nan)).cpu()


def _softmax(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """Softmax over the last dimension, 0 in rows that see nothing."""
    largest = scores.amax(-1, keepdim=True).clamp(min=torch.finfo(scores.dtype).min)
    weights = (scores - largest).exp_()
    total = weights.sum(-1, keepdim=True)
    if sinks is not None:
        total = total + (sinks.float().view(1, 1) - largest).exp()
    return weights / total.clamp(min=torch.finfo(total.dtype).tiny)
