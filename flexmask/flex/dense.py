"""Dense attention with the visibility of sparse attention, for short prompts, single heads and decoding."""

from __future__ import annotations

import torch
from torch import Tensor

from flexmask._torch import is_traced
from flexmask.base.inputs import AttentionInputs
from flexmask.base.visibility import token_validity, visible_keys
from flexmask.flex.visible import attention_to_visible, is_written_out, sdpa

_MOST_SCORES = 2**28  # float32
_MOST_VISIBLE = 2**26  # bool, and SDPA's copy


def dense_attention(inputs: AttentionInputs, return_lse: bool = False) -> tuple[Tensor, Tensor | None]:
    """Attention to every visible key: SDPA where it can, else written out in float32. Autocast must be off.

    Rows that see nothing give zero and a log-sum-exp of -inf, which leaves out sinks. Calls with a map of visible keys go through
    the rows in parts, in a surrounding compilation at once.
    """
    if not sdpa_serves(inputs, return_lse):
        return _in_parts(inputs, return_lse)
    assert inputs.value is not None
    # a single row sees every key
    return sdpa(inputs.query, inputs.key, inputs.value, inputs.scale, is_causal=inputs.query.shape[2] > 1), None


def _in_parts(inputs: AttentionInputs, return_lse: bool) -> tuple[Tensor, Tensor | None]:
    query, key = inputs.query, inputs.key
    (batch, num_heads, q_len, _), kv_len = query.shape, key.shape[2]
    tokens = token_validity(q_len, kv_len, inputs.offset, inputs.attention_mask, key)
    row = tokens.offset.unsqueeze(-1) + torch.arange(q_len, device=key.device)
    rows = q_len
    if not is_traced():
        most = _MOST_SCORES // (batch * num_heads) if is_written_out(inputs, return_lse) else _MOST_VISIBLE // batch
        rows = max(1, most // kv_len)
    hidden = None if tokens.filled else ~tokens.key_valid
    outs, lses = [], []
    for part, position, row_valid in zip(query.split(rows, 2), row.split(rows, 1), tokens.row_valid.split(rows, 1), strict=True):
        visible = visible_keys(position, row_valid, tokens, inputs.window)
        out, lse = attention_to_visible(inputs, part, visible[:, None], hidden, return_lse)
        outs.append(out)
        lses.append(lse)
    if len(outs) == 1:
        return outs[0], lses[0]
    return torch.cat(outs, 2), torch.cat([lse for lse in lses if lse is not None], 2) if return_lse else None


def sdpa_serves(inputs: AttentionInputs, return_lse: bool) -> bool:
    """True if SDPA takes the inputs without a map of visible keys: whole prompts and single rows."""
    all_tokens = inputs.window is None and inputs.attention_mask is None and inputs.offset is None
    return all_tokens and inputs.query.shape[2] in (1, inputs.key.shape[2]) and not is_written_out(inputs, return_lse)
