"""Products of all query rows with keys."""

from __future__ import annotations

import torch
from torch import Tensor

from flexmask._torch import HAS_BMM_TO_FLOAT32
from flexmask.base.scores import grouped_scores


def products(query: Tensor, key: Tensor) -> Tensor:
    """As `grouped_scores`; on CUDA half-precision operands go to tensor cores as they are: exact products, summed in float32."""
    half = query.dtype == key.dtype and query.dtype in (torch.float16, torch.bfloat16)
    if not (half and query.is_cuda and HAS_BMM_TO_FLOAT32):
        return grouped_scores(query, key)
    batch, num_heads, rows, head_dim = query.shape
    num_kv_heads = key.shape[1]
    together = query.reshape(batch * num_kv_heads, num_heads // num_kv_heads * rows, head_dim)
    scores = torch.bmm(together, key.flatten(0, 1).transpose(1, 2), out_dtype=torch.float32)
    return scores.reshape(batch, num_heads, rows, key.shape[2])
