"""Dense attention with FlexPrefill's visibility, for short prompts and for decoding."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from flexmask.pooling import capped
from flexmask.visibility import token_validity

_MOST_SCORES = 2**28  # a float32 each, where attention is written out


def dense_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    softcap: float | None,
    window: int | None,
    attention_mask: Tensor | None,
    offset: Tensor | None,
    return_lse: bool,
) -> tuple[Tensor, Tensor | None]:
    """Attention to every visible key: SDPA where it can, else written out in float32.

    SDPA knows neither soft-capping nor the log-sum-exp. Rows that see nothing give zero and a log-sum-exp of -inf. Written
    out, it goes through the query rows in parts whose scores take a GiB at most; inside a surrounding compilation in one.

    Returns
    -------
    tuple
        (batch, num_heads, q_len, v_head_dim) in query's dtype; (batch, num_heads, q_len) float32 with `return_lse`, else None.
    """
    q_len, kv_len = query.shape[2], key.shape[2]
    groups = query.shape[1] // key.shape[1]
    whole = offset is None and q_len in (1, kv_len) and window is None and attention_mask is None
    if whole and softcap is None and not return_lse:
        causal = q_len > 1  # a single row at the end sees every key
        out = F.scaled_dot_product_attention(query, key, value, is_causal=causal, scale=scale, enable_gqa=groups > 1)
        return out, None

    tokens = token_validity(q_len, kv_len, offset, attention_mask, key)
    position = tokens.offset.unsqueeze(-1) + torch.arange(q_len, device=key.device)
    distance = position.unsqueeze(-1) - torch.arange(kv_len, device=key.device)
    visible = (distance >= 0) & tokens.key_valid.unsqueeze(-2) & tokens.row_valid.unsqueeze(-1)
    if window is not None:
        visible = visible & (distance < window)
    visible = visible[:, None]  # (batch or 1, 1, q_len, kv_len)
    sees = visible.any(-1, keepdim=True)
    if softcap is None and not return_lse:
        # a row that sees nothing sees everything instead, so that no NaN comes of it, and is zeroed after
        out = F.scaled_dot_product_attention(query, key, value, attn_mask=visible | ~sees, scale=scale, enable_gqa=groups > 1)
        return torch.where(sees, out, 0.0), None

    key, value = (x.float().repeat_interleave(groups, dim=1) for x in (key, value))
    rows = q_len
    if not torch.compiler.is_compiling():
        rows = max(1, _MOST_SCORES // (query.shape[0] * query.shape[1] * kv_len))
    outs, lses = [], []
    for q, seen, some in zip(query.split(rows, 2), visible.split(rows, 2), sees.split(rows, 2), strict=True):
        scores = torch.where(seen, capped(q.float() @ key.transpose(-1, -2) * scale, softcap), float("-inf"))
        lses.append(scores.logsumexp(-1))
        outs.append(torch.where(some, torch.where(some, scores, 0.0).softmax(-1) @ value, 0.0).to(query.dtype))
    return torch.cat(outs, 2), torch.cat(lses, 2) if return_lse else None
