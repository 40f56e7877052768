"""Means of blocks, attention scores of grouped heads, their softmax, and top-p over them in the widest float of a device."""

from __future__ import annotations

import torch
from torch import Tensor

from flexmask._torch import HAS_BMM_TO_FLOAT32, is_traced
from flexmask.base.visibility import split_into_blocks


def block_means(x: Tensor, valid: Tensor | None, block_size: int) -> Tensor:
    """Mean of every block's valid tokens (None: all), (batch, heads, num_blocks, head_dim) float32; zero without any.

    `x` is (batch, heads, length, head_dim), `valid` (batch or 1, length) bool; what invalid tokens hold does not matter.
    """
    values = x.float()
    if valid is None:
        valid = torch.ones(1, x.shape[2], dtype=torch.bool, device=x.device)
    else:
        values = torch.where(valid[:, None, :, None], values, 0.0)
    count = split_into_blocks(valid, block_size).sum(-1)
    return split_into_blocks(values, block_size, 2).sum(3) / count.clamp(min=1)[:, None, :, None]


def grouped_scores(query: Tensor, key: Tensor) -> Tensor:
    """``query @ key^T`` in float32 where groups of query heads share a KV head, (batch, num_heads, rows, columns)."""
    batch, num_heads, rows, head_dim = query.shape
    num_kv_heads = key.shape[1]
    together = query.reshape(batch * num_kv_heads, num_heads // num_kv_heads * rows, head_dim)
    columns = key.flatten(0, 1).transpose(1, 2)
    if not query.is_cuda:
        scores = together.float() @ columns.float()
    elif HAS_BMM_TO_FLOAT32 and query.dtype == key.dtype and query.dtype.itemsize == 2:
        # tensor cores take half precision as it is: exact products, summed in float32
        scores = torch.bmm(together, columns, out_dtype=torch.float32)
    else:
        # products of float32 may run in TF32, by a setting of the program that holds in all threads
        scores = (together.double() @ columns.double()).float()
    return scores.reshape(batch, num_heads, rows, key.shape[2])


def capped(scores: Tensor, softcap: float | None) -> Tensor:
    """``softcap * tanh(scores / softcap)``; unchanged where softcap is None."""
    return scores if softcap is None else softcap * torch.tanh(scores / softcap)


def masked_softmax(scores: Tensor, visible: Tensor) -> Tensor:
    """Softmax over the visible entries of the last dimension, in place; a row that sees nothing gets equal weights, not 0."""
    # new memory takes longer than the arithmetic on CPUs
    scores.masked_fill_(~visible, torch.finfo(scores.dtype).min)
    if scores.device.type != "cpu" or is_traced():
        return scores.softmax(-1)
    return torch.softmax(scores, -1, out=scores)


def widest_float(device: torch.device) -> torch.dtype:
    """The dtype of sums and thresholds: float64, or float32 where `device` lacks it (Apple's GPUs and some of Intel's)."""
    if device.type == "mps":
        return torch.float32
    if device.type == "xpu" and not torch.xpu.get_device_properties(device).has_fp64:
        return torch.float32
    return torch.float64


def running_sums(values: Tensor, precision: torch.dtype) -> Tensor:
    """Cumulative sums over the last dimension of float32 values >= 0, sums of at most 2**22; NaN affects only its own sums."""
    # a running float32 sum over a large map never reaches 0.99 of its total: without float64, int64 of 40 binary places
    if precision == torch.float64:
        return values.double().cumsum(-1)
    return (values * 2.0**40).to(torch.int64).cumsum(-1).float() * 2.0**-40


def ranks(values: Tensor, candidates: Tensor) -> Tensor:
    """Rank of every entry >= 0 in descending order, int64 from 0: candidates first, of equal values the lower index."""
    order = torch.where(candidates, values, -1.0).sort(dim=-1, descending=True, stable=True).indices
    return torch.zeros_like(order).scatter(-1, order, torch.arange(order.shape[-1], device=order.device).expand_as(order))


def top_p_count(values: Tensor, candidates: Tensor, gamma: Tensor) -> Tensor:
    """Count the fewest candidates whose sum reaches gamma times the sum of all candidates; every candidate at gamma 1."""
    ordered = torch.where(candidates, values, 0.0).sort(dim=-1, descending=True).values
    running = running_sums(ordered, gamma.dtype)
    count = (running - ordered < gamma.unsqueeze(-1) * running[..., -1:]).sum(-1)
    # at 1 neither rounding nor weightless candidates may decide
    return torch.where(gamma >= 1, candidates.sum(-1), count)


def top_p(values: Tensor, candidates: Tensor, gamma: Tensor, forced: Tensor | None = None) -> Tensor:
    """The fewest candidates whose sum reaches gamma times the sum of all, bool; `forced` ones count first. All at gamma 1.

    `values` is (..., n) float32 >= 0, NaN counts as 0; `gamma` broadcasts to (...,), in the sums' dtype.
    """
    values = torch.where(candidates, values.nan_to_num(0.0), 0.0)
    first = values if forced is None else torch.where(forced, float("inf"), values)
    order = torch.where(candidates, first, -1.0).sort(dim=-1, descending=True, stable=True).indices
    weights = values.gather(-1, order)
    running = running_sums(weights, gamma.dtype)
    gamma = gamma.unsqueeze(-1)
    kept = (running - weights < gamma * running[..., -1:]) | (gamma >= 1)
    kept = torch.zeros_like(kept).scatter(-1, order, kept)
    return (kept if forced is None else kept | forced) & candidates
