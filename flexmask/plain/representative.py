"""Attention of the representative query rows to every key (the paper's A-hat)."""

from __future__ import annotations

import torch
from torch import Tensor

from flexmask.base.inputs import AttentionInputs
from flexmask.base.representative_rows import RepresentativeRows
from flexmask.base.scores import capped, grouped_scores, masked_softmax
from flexmask.base.visibility import Tokens


def take_rows(query: Tensor, rows: RepresentativeRows) -> Tensor:
    """The representative rows of query, (batch, num_heads, block_size, head_dim); zero where a slot is not taken."""
    batch, num_heads, _, head_dim = query.shape
    index = rows.row[:, None, :, None].expand(batch, num_heads, -1, head_dim)
    return query.gather(2, index).masked_fill(~rows.taken[:, None, :, None], 0)


def representative_attention(inputs: AttentionInputs, rows: RepresentativeRows, tokens: Tokens) -> Tensor:
    """Softmax attention of the representative rows to all keys they see, (batch, num_heads, block_size, kv_len) float32.

    Slots that are not taken hold no meaning.
    """
    position, column = rows.position.unsqueeze(-1), torch.arange(inputs.key.shape[2], device=inputs.key.device)
    visible = tokens.key_valid.unsqueeze(-2) & rows.taken.unsqueeze(-1) & (column <= position)
    if inputs.window is not None:
        visible = visible & (column > position - inputs.window)
    query = take_rows(inputs.query, rows).float() * inputs.scale
    return masked_softmax(capped(grouped_scores(query, inputs.key), inputs.softcap), visible[:, None])
