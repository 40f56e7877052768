"""Dense attention with the visibility of sparse attention, by SDPA where it can, else written out in float32."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from flexmask._torch import is_traced
from flexmask.base.inputs import AttentionInputs, without_autocast
from flexmask.base.scores import capped
from flexmask.base.visibility import visible_keys

_MAX_SCORES = 2**28  # float32 scores at one time
_MAX_VISIBLE = 2**26  # entries at one time of a map of visible keys: bool, and SDPA's copy


def dense_attention(inputs: AttentionInputs, return_lse: bool = False) -> tuple[Tensor, Tensor | None]:
    """Attention to every visible key, whatever autocast; rows that see nothing give zero. The log-sum-exp leaves out sinks."""
    with without_autocast(inputs.query.device):
        if not sdpa_serves(inputs, return_lse):
            return _attend_in_parts(inputs, return_lse)
        assert inputs.value is not None
        # a single row sees every key
        return sdpa(inputs.query, inputs.key, inputs.value, inputs.scale, is_causal=inputs.query.shape[2] > 1), None


def _attend_in_parts(inputs: AttentionInputs, return_lse: bool) -> tuple[Tensor, Tensor | None]:
    query, tokens = inputs.query, inputs.tokens()
    (batch, num_heads, q_len, _), kv_len = query.shape, inputs.key.shape[2]
    rows = q_len
    if not is_traced():
        max_pairs = _MAX_SCORES // (batch * num_heads) if is_written_out(inputs, return_lse) else _MAX_VISIBLE // batch
        rows = max(1, max_pairs // kv_len)
    hidden = None if tokens.known_all_valid else ~tokens.key_valid
    outs, lses = [], []
    cuts = query.split(rows, 2), tokens.position.split(rows, 1), tokens.row_valid.split(rows, 1)
    for part, position, row_valid in zip(*cuts, strict=True):
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


def attention_to_visible(
    inputs: AttentionInputs, query: Tensor, visible: Tensor, hidden: Tensor | None, return_lse: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Attention of some rows, `query`, to visible keys; a row that sees nothing gives zero and a log-sum-exp of -inf.

    `visible` is (batch or 1, num_heads or 1, q_len, kv_len) bool. `hidden`, (batch or 1, kv_len) bool, has the keys that may hold
    NaN; rows that see nothing may hold NaN, too.
    """
    key, value, sinks = inputs.key, inputs.value, inputs.sinks
    assert value is not None
    if hidden is not None:
        # 0 * NaN is NaN, also in gradients; not masked_fill, which copies first
        key, value = (torch.where(hidden[:, None, :, None], 0.0, x) for x in (key, value))
    batch, num_heads, q_len = query.shape[:3]
    num_kv_heads, kv_len = key.shape[1], key.shape[2]
    sees = visible.any(-1, keepdim=True)
    query = torch.where(sees, query, 0.0)
    if not is_written_out(inputs, return_lse):
        # a row that sees nothing sees everything, and is zeroed after
        return torch.where(sees, sdpa(query, key, value, inputs.scale, attn_mask=visible | ~sees), 0.0), None

    # a KV head's query heads as rows: no copy of keys and values
    rows = query.float().reshape(batch, num_kv_heads, num_heads // num_kv_heads * q_len, -1)
    scores = capped(rows @ key.float().mT * inputs.scale, inputs.softcap).reshape(batch, num_heads, q_len, kv_len)
    scores = torch.where(visible, scores, float("-inf"))
    lse = scores.logsumexp(-1)
    total = lse if sinks is None else torch.logaddexp(lse, sinks.float()[:, None])
    weights = torch.exp(scores - torch.where(sees, total.unsqueeze(-1), 0.0))
    out = weights.reshape(batch, num_kv_heads, -1, kv_len) @ value.float()
    return out.reshape(batch, num_heads, q_len, -1).to(query.dtype), lse if return_lse else None


def is_written_out(inputs: AttentionInputs, return_lse: bool) -> bool:
    """True if attention is written out in PyTorch, for what SDPA lacks: soft caps, sinks, the log-sum-exp."""
    return inputs.softcap is not None or inputs.sinks is not None or return_lse


def has_fused_kernel(query: Tensor, key: Tensor, value: Tensor, is_masked: bool = False) -> bool:
    """True if SDPA on CUDA has a kernel for these heads as they are that does not write out all scores (sdp_utils.cpp)."""
    # flash attention takes groups in half precision, no mask; cuDNN's masks, narrower; the memory-efficient kernel no groups
    widest = 128 if is_masked else 256
    in_half = query.dtype != torch.float32
    return query.shape[1] == key.shape[1] or (in_half and query.shape[3] == value.shape[3] <= widest)


def sdpa(query: Tensor, key: Tensor, value: Tensor, scale: float, **mask: Any) -> Tensor:
    """SDPA of grouped heads; `mask` is ``is_causal`` or ``attn_mask``."""
    if key.is_cuda and not has_fused_kernel(query, key, value, "attn_mask" in mask):
        # for the memory-efficient kernel: else SDPA would write out the scores of the whole call
        key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
    grouped = query.shape[1] != key.shape[1]
    return F.scaled_dot_product_attention(query, key, value, **mask, scale=scale, enable_gqa=grouped)
