"""One step of SGLang: its split, the cache slots of sparse requests, and the batch of all other requests."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flexmask.integrations.serving.chunk import SparseRequest
from flexmask.integrations.serving.split import StepSplit

PROMPTS = ("EXTEND", "MIXED")  # SGLang's names of steps whose long requests run sparse
# a step runs stock if its batch has one of these fields: its rows may then see keys after them, pages of other ranks, or slots
# outside the pool
STOCK_FIELDS = (
    "spec_info", "encoder_lens", "multi_item_delimiter_indices", "attn_cp_metadata", "attn_dcp_metadata", "dcp_kv_mask",
    "tbo_children", "out_cache_loc_virtual",
)  # fmt: skip
# fields of a batch with one number per request: on the device, on the host, and in lists
_TENSORS = ("req_pool_indices", "seq_lens", "orig_seq_lens", "extend_seq_lens", "extend_prefix_lens")
_HOST_TENSORS = ("seq_lens_cpu",)
_LISTS = ("extend_seq_lens_cpu", "extend_prefix_lens_cpu", "extend_logprob_start_lens_cpu")
_ROWS = ("input_ids", "positions", "out_cache_loc")  # one number per row


Lengths = tuple[list[int], list[int]]  # by request: rows, and cached tokens


class Step(NamedTuple):
    """A split step with at least one sparse request."""

    split: StepSplit
    sparse: tuple[tuple[SparseRequest, Tensor | None], ...]  # with the slots of its cached tokens, int64; None without any
    stock_rows: slice | Tensor | None  # of the packed batch; None: all rows are sparse
    stock_batch: Any  # SGLang's batch of the requests of these rows
    lengths: Lengths  # of all requests

    @property
    def num_rows(self) -> int:
        """Number of rows of all requests. The batch may be padded beyond it."""
        return sum(self.lengths[0])


def lengths_of(forward_batch: Any) -> Lengths | None:
    """Rows and cached tokens of each request, if the host has them."""
    rows, cached = forward_batch.extend_seq_lens_cpu, forward_batch.extend_prefix_lens_cpu
    return None if rows is None or cached is None else (list(map(int, rows)), list(map(int, cached)))


def step_reason(forward_batch: Any) -> str | None:
    """Return why all rows of a batch run stock, or None."""
    names = [name for name in STOCK_FIELDS if getattr(forward_batch, name, None) is not None]
    if names:
        return f"a batch has {', '.join(names)}"
    return "the host has no lengths of a batch" if lengths_of(forward_batch) is None else None


def step_of(forward_batch: Any, split: StepSplit, lengths: Lengths, req_to_token: Tensor) -> Step:
    """The step of a split. Its tensors are made once, for all layers."""
    indices = forward_batch.req_pool_indices
    sparse = tuple(
        (request, slots_of(req_to_token, indices, request.batch_index, request.cached_len)) for request in split.sparse
    )
    if not split.stock:
        return Step(split, sparse, None, None, lengths)
    requests = list(chain.from_iterable(range(span.first_request, span.end_request) for span in split.stock))
    if len(split.stock) == 1:
        rows: slice | Tensor = slice(split.stock[0].start, split.stock[0].stop)
    else:
        rows = torch.cat([torch.arange(span.start, span.stop, device=indices.device) for span in split.stock])
    return Step(split, sparse, rows, part_of(forward_batch, requests, rows), lengths)


def slots_of(req_to_token: Tensor, req_pool_indices: Tensor, request: int, tokens: int) -> Tensor | None:
    """Slots of a request's first `tokens` tokens in SGLang's table, (tokens,) int64, without waiting; None for no tokens."""
    if tokens == 0:
        return None
    return req_to_token[:, :tokens].index_select(0, req_pool_indices[request : request + 1].long())[0].long()


def gathered(buffer: Tensor, slots: Tensor) -> Tensor:
    """Keys or values in these slots, (num_kv_heads, tokens, head_dim), from (slots, num_kv_heads, head_dim)."""
    # torch cannot index FP8 tensors
    rows = buffer.view(torch.uint8)[slots].view(buffer.dtype) if buffer.dtype.itemsize == 1 else buffer[slots]
    return rows.transpose(0, 1)


def part_of(forward_batch: Any, requests: Sequence[int], rows: slice | Tensor) -> Any:
    """A batch of some of the requests and their `rows`, for a stock backend."""
    part = copy.copy(forward_batch)
    # the output's buffer is for all rows
    part.__dict__.pop("_attn_output", None)
    chosen = torch.tensor(list(requests))
    on_device = chosen.to(forward_batch.req_pool_indices.device, non_blocking=True)
    for names, index in ((_TENSORS, on_device), (_HOST_TENSORS, chosen), (_ROWS, rows), (_LISTS, None)):
        for name in names:
            value = getattr(part, name, None)
            if value is not None:
                setattr(part, name, [value[request] for request in requests] if index is None else value[index])
    part.batch_size, part.extend_num_tokens = len(requests), sum(part.extend_seq_lens_cpu)
    part.seq_lens_sum = sum(part.extend_prefix_lens_cpu) + part.extend_num_tokens
    if part.extend_seq_lens is not None:
        part.extend_start_loc = part.extend_seq_lens.cumsum(0, dtype=part.extend_seq_lens.dtype) - part.extend_seq_lens
    return part
