"""One step of SGLang: its plan, where the tokens of sparse requests are in the cache, and the batch of all other requests."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from itertools import accumulate, chain
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flexmask.dense_policy import DensePolicy
from flexmask.integrations.serving.plan import StepPlan, plan_step

PROMPTS = ("EXTEND", "MIXED")
"""SGLang's names of steps whose long requests run sparse"""
# what a batch may hold that makes rows see other keys than those before them, or pages of other ranks: such a step runs stock
STOCK_FIELDS = (
    "spec_info", "encoder_lens", "multi_item_delimiter_indices", "attn_cp_metadata", "attn_dcp_metadata", "dcp_kv_mask",
    "tbo_children",
)  # fmt: skip
# of a batch, one number a request: on the device, on the host, and in lists
_TENSORS = ("req_pool_indices", "seq_lens", "orig_seq_lens", "extend_seq_lens", "extend_prefix_lens")
_HOST_TENSORS = ("seq_lens_cpu",)
_LISTS = ("extend_seq_lens_cpu", "extend_prefix_lens_cpu", "extend_logprob_start_lens_cpu")
# one a row
_ROWS = ("input_ids", "positions", "out_cache_loc")


class Step(NamedTuple):
    """A planned step with at least one sparse request."""

    plan: StepPlan
    slots: tuple[Tensor, ...]  # of each sparse request: where its tokens are in the cache, (tokens,) int64
    stock_rows: slice | Tensor | None  # of the packed batch; None: all rows are sparse
    stock_batch: Any  # SGLang's batch of the requests of these rows
    rows: int  # of all requests; a batch may have more, which are padding


def plan_batch(forward_batch: Any, policy: DensePolicy) -> StepPlan | None:
    """The plan of a step of prompts, from lengths that the host has; None for any other step, which runs stock."""
    mode = forward_batch.forward_mode.name
    rows, before = forward_batch.extend_seq_lens_cpu, forward_batch.extend_prefix_lens_cpu
    if mode not in PROMPTS or rows is None or before is None:
        return None
    if any(getattr(forward_batch, name, None) is not None for name in STOCK_FIELDS):
        return None
    starts = [0, *accumulate(int(each) for each in rows)]
    return plan_step(starts, [int(a) + int(b) for a, b in zip(before, rows, strict=True)], policy)


def step_of(forward_batch: Any, plan: StepPlan, req_to_token: Tensor) -> Step:
    """The step of a plan, for all layers: its tensors are made once."""
    slots = tuple(slots_of(req_to_token, forward_batch.req_pool_indices, each.request, each.tokens) for each in plan.sparse)
    number = sum(int(each) for each in forward_batch.extend_seq_lens_cpu)
    if not plan.stock:
        return Step(plan, slots, None, None, number)
    requests = list(chain.from_iterable(range(run.first, run.last) for run in plan.stock))
    if len(plan.stock) == 1:
        rows: slice | Tensor = slice(plan.stock[0].start, plan.stock[0].stop)
    else:
        device = forward_batch.req_pool_indices.device
        rows = torch.cat([torch.arange(run.start, run.stop, device=device) for run in plan.stock])
    return Step(plan, slots, rows, part_of(forward_batch, requests, rows), number)


def slots_of(req_to_token: Tensor, req_pool_indices: Tensor, request: int, tokens: int) -> Tensor:
    """Places in the cache of a request's first `tokens` tokens, (tokens,) int64, without waiting for the device.

    `req_to_token` is SGLang's table, (requests, tokens); `req_pool_indices` the row in it of each request of the batch.
    """
    return req_to_token[:, :tokens].index_select(0, req_pool_indices[request : request + 1].long())[0].long()


def gathered(buffer: Tensor, slots: Tensor, dtype: torch.dtype, scale: Tensor | None = None) -> Tensor:
    """Keys or values of one request, (num_kv_heads, tokens, head_dim) and contiguous, from (slots, num_kv_heads, head_dim).

    An FP8 buffer holds them divided by `scale`, one number; they are rounded to `dtype` once.
    """
    if buffer.dtype == dtype:
        return buffer[slots].transpose(0, 1).contiguous()
    rows = buffer.view(torch.uint8)[slots].view(buffer.dtype).transpose(0, 1).to(dtype, memory_format=torch.contiguous_format)
    return rows if scale is None else rows.mul_(scale.to(dtype))


def part_of(forward_batch: Any, requests: Sequence[int], rows: slice | Tensor) -> Any:
    """A batch of some of the requests, with the rows that they have, for a stock backend."""
    part = copy.copy(forward_batch)
    # a buffer for the output of all rows
    part.__dict__.pop("_attn_output", None)
    chosen = torch.tensor(list(requests))
    on_device = chosen.to(forward_batch.req_pool_indices.device, non_blocking=True)
    for names, index in ((_TENSORS, on_device), (_HOST_TENSORS, chosen), (_ROWS, rows)):
        for name in names:
            value = getattr(part, name, None)
            if value is not None:
                setattr(part, name, value[index])
    for name in _LISTS:
        value = getattr(part, name, None)
        if value is not None:
            setattr(part, name, [value[each] for each in requests])
    part.batch_size = len(requests)
    lengths = [a + b for a, b in zip(part.extend_prefix_lens_cpu, part.extend_seq_lens_cpu, strict=True)]
    part.seq_lens_sum = sum(lengths)
    part.extend_num_tokens = sum(part.extend_seq_lens_cpu)
    if part.extend_seq_lens is not None:
        part.extend_start_loc = part.extend_seq_lens.cumsum(0, dtype=part.extend_seq_lens.dtype) - part.extend_seq_lens
    return part
