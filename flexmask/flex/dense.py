"""Dense attention with FlexPrefill's visibility, for short prompts and for decoding."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from flexmask._torch import without_autocast
from flexmask.base.inputs import AttentionInputs
from flexmask.base.scores import capped
from flexmask.base.visibility import token_validity

_MOST_SCORES = 2**28  # a float32 each, where attention is written out
_MOST_VISIBLE = 2**26  # a bool each, and SDPA's own copy


def runs_dense(q_len: int, tokens: int, dense_below: int, least_rows: int = 2) -> bool:
    """Decide by lengths whether attention runs dense: too few tokens so far, or too few query rows to select for."""
    return q_len < least_rows or tokens < dense_below


def sdpa_serves(inputs: AttentionInputs, return_lse: bool) -> bool:
    """Decide if SDPA takes the problem as it is, without a map of visible keys: whole prompts and single rows."""
    all_tokens = inputs.window is None and inputs.attention_mask is None and inputs.offset is None
    return all_tokens and inputs.query.shape[2] in (1, inputs.key.shape[2]) and not _is_written_out(inputs, return_lse)


def has_fused_kernel(inputs: AttentionInputs) -> bool:
    """Decide if SDPA on CUDA has a kernel that writes out no scores: grouped heads in half precision, values as wide as keys."""
    query, key, value = inputs.query, inputs.key, inputs.value
    assert value is not None
    return query.shape[1] == key.shape[1] or (query.dtype != torch.float32 and query.shape[3] == value.shape[3])


def _is_written_out(inputs: AttentionInputs, return_lse: bool) -> bool:
    return inputs.softcap is not None or inputs.sinks is not None or return_lse


def dense_attention(inputs: AttentionInputs, return_lse: bool = False) -> tuple[Tensor, Tensor | None]:
    """Attention to every visible key: SDPA where it can, else written out in float32.

    SDPA knows neither soft-capping nor sinks nor the log-sum-exp. Autocast is off for both. Rows that see nothing give zero and a
    log-sum-exp of -inf. What needs a map of visible keys goes through the query rows in parts: 64 MiB of map, or a GiB of scores
    where attention is written out, at a time; inside a surrounding compilation in one.

    Returns
    -------
    tuple
        (batch, num_heads, q_len, v_head_dim) in query's dtype; (batch, num_heads, q_len) float32 with `return_lse`, else None.
        The log-sum-exp is of the keys alone, without the sinks.
    """
    with without_autocast(inputs.query.device):
        return _dense_attention(inputs, return_lse)


def _dense_attention(inputs: AttentionInputs, return_lse: bool) -> tuple[Tensor, Tensor | None]:
    query, key, value = inputs.query, inputs.key, inputs.value
    assert value is not None
    batch, num_heads, q_len = query.shape[:3]
    kv_len = key.shape[2]
    written_out = _is_written_out(inputs, return_lse)
    if sdpa_serves(inputs, return_lse):
        causal = q_len > 1  # a single row at the end sees every key
        return _sdpa(inputs, is_causal=causal), None

    inputs = inputs.without_absent()
    tokens = token_validity(q_len, kv_len, inputs.offset, inputs.attention_mask, key)
    row = tokens.offset.unsqueeze(-1) + torch.arange(q_len, device=key.device)
    column = torch.arange(kv_len, device=key.device)
    rows = q_len
    if not torch.compiler.is_compiling():
        most = _MOST_SCORES // (batch * num_heads) if written_out else _MOST_VISIBLE // batch
        rows = max(1, most // kv_len)
    outs, lses = [], []
    for part, position, row_valid in zip(query.split(rows, 2), row.split(rows, 1), tokens.row_valid.split(rows, 1), strict=True):
        visible = (column <= position.unsqueeze(-1)) & tokens.key_valid.unsqueeze(-2) & row_valid.unsqueeze(-1)
        if inputs.window is not None:
            visible = visible & (column > position.unsqueeze(-1) - inputs.window)
        out, lse = _attention_to_visible(inputs.with_query(part), visible[:, None], return_lse)
        outs.append(out)
        lses.append(lse)
    if len(outs) == 1:
        return outs[0], lses[0]
    return torch.cat(outs, 2), torch.cat([lse for lse in lses if lse is not None], 2) if return_lse else None


def _sdpa(inputs: AttentionInputs, **mask: Any) -> Tensor:
    query, key, value = inputs.query, inputs.key, inputs.value
    assert value is not None
    if _copies_heads(inputs):
        key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
    grouped = query.shape[1] != key.shape[1]
    return F.scaled_dot_product_attention(query, key, value, **mask, scale=inputs.scale, enable_gqa=grouped)


def _copies_heads(inputs: AttentionInputs) -> bool:
    # CUDA's fused kernels take no groups here; without them SDPA copies the heads too, and writes out the scores
    return inputs.key.is_cuda and not has_fused_kernel(inputs)


def attention_to_visible(inputs: AttentionInputs, visible: Tensor, return_lse: bool = False) -> tuple[Tensor, Tensor | None]:
    """Attention under a map of visible keys, (batch or 1, num_heads or 1, q_len, kv_len) bool; as `dense_attention` otherwise.

    Window, padding and offset of `inputs` are not looked at: `visible` holds them. Keys and values that no row sees may hold
    anything, NaN too, as a cache made by ``torch.empty`` does.
    """
    hidden = ~visible.any(-2).any(1)
    with without_autocast(inputs.query.device):
        return _attention_to_visible(inputs.with_zeros(hidden), visible, return_lse)


def _attention_to_visible(inputs: AttentionInputs, visible: Tensor, return_lse: bool) -> tuple[Tensor, Tensor | None]:
    query, key, value, sinks = inputs.query, inputs.key, inputs.value, inputs.sinks
    assert value is not None
    batch, num_heads, q_len = query.shape[:3]
    num_kv_heads, kv_len = key.shape[1], key.shape[2]
    sees = visible.any(-1, keepdim=True)
    if inputs.softcap is None and sinks is None and not return_lse:
        # a row that sees nothing sees everything instead, to avoid NaN, and is zeroed after
        return torch.where(sees, _sdpa(inputs, attn_mask=visible | ~sees), 0.0), None

    # the rows of all query heads of a key head side by side, so that keys and values need no copy a query head
    rows = query.float().reshape(batch, num_kv_heads, num_heads // num_kv_heads * q_len, -1)
    scores = capped(rows @ key.float().mT * inputs.scale, inputs.softcap).reshape(batch, num_heads, q_len, kv_len)
    scores = torch.where(visible, scores, float("-inf"))
    lse = scores.logsumexp(-1)
    total = lse if sinks is None else torch.logaddexp(lse, sinks.float()[:, None])
    weights = torch.exp(scores - torch.where(sees, total.unsqueeze(-1), 0.0))
    out = weights.reshape(batch, num_kv_heads, -1, kv_len) @ value.float()
    return out.reshape(batch, num_heads, q_len, -1).to(query.dtype), lse if return_lse else None
