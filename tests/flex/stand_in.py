"""A stand-in for flash-attn-4 that follows its interface, in float64 on a CPU."""

import math
from typing import Any, NamedTuple

import torch

from flexmask.base.selection import listed_blocks
from tests.expected import masked_attention, seen_pairs


class Lists(NamedTuple):
    mask_block_cnt: Any
    mask_block_idx: Any
    full_block_cnt: Any
    full_block_idx: Any
    block_size: tuple[int, int]


def forward(q, k, v, *, softmax_scale, causal, window_size_left, block_sparse_tensors, return_lse, out=None, fault=""):
    """flash-attn-4's forward, of (batch, tokens, heads, head_dim); `fault`: what it does wrong."""
    assert causal and all(x.stride(-1) == 1 for x in (q, k, v))
    assert window_size_left is None or window_size_left < 2**31
    rows, columns = block_sparse_tensors.block_size
    query, key, value = (x.transpose(1, 2) for x in (q, k, v))
    q_len, kv_len = q.shape[1], k.shape[1]
    window = None if window_size_left is None or fault == "window" else window_size_left + 1
    offset = torch.full((1,), 0 if fault == "offset" else kv_len - q_len)
    seen = seen_pairs(q_len, offset, torch.ones(1, kv_len, dtype=torch.bool), window)[:, None]
    counts = [torch.zeros_like(x) if fault == name else x for name, x in zip(Lists._fields, block_sparse_tensors, strict=True)]
    if fault != "lists":
        lists = (listed_blocks(*counts[at : at + 2], -(-kv_len // columns)) for at in (0, 2))
        blocks = next(lists) | next(lists)
        seen = seen & blocks.repeat_interleave(rows, 2)[:, :, :q_len].repeat_interleave(columns, 3)[..., :kv_len]
    result, lse = masked_attention(query, key, value, seen, softmax_scale)
    sees = seen.any(-1, keepdim=True)
    result, lse = torch.where(sees, result, 0.0), torch.where(sees[..., 0], lse, -math.inf)
    if fault == "no log-sum-exp" and not return_lse:
        result = result + 0.1
    result = result.to(q.dtype).transpose(1, 2).contiguous()
    if out is not None:
        assert out.shape == result.shape and out.dtype == q.dtype
        result = out.copy_(result)
    return result, lse.float() * (0.9 if fault == "log-sum-exp" else 1) if return_lse else None, "of later releases"
