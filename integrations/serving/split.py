"""Splits the rows of a scheduler's step into sparse requests and stock spans, without waiting for a device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from flexmask.dense_policy import DensePolicy
from flexmask.integrations.serving.chunk import SparseRequest
from flexmask.integrations.serving.options import RequestOptions


class StepRequests(NamedTuple):
    """The requests of a step, in the order of its rows."""

    starts: Sequence[int]  # first rows, and the end of the last
    seq_lens: Sequence[int] | None  # tokens including this step's; None: all rows run stock
    # False: the request decodes, or verifies speculative tokens; None: more than one row means a prefill
    is_prefilling: Sequence[bool] | None = None
    # of the first requests; requests that pad the batch have none
    options: Sequence[RequestOptions | None] = ()
    prompt_lens: Sequence[int] = ()  # tokens


class StockSpan(NamedTuple):
    """Neighbouring requests that the engine's kernel handles in one call."""

    first_request: int
    end_request: int  # exclusive
    start: int  # rows
    stop: int


class StepSplit(NamedTuple):
    """The rows of one step, without the requests that pad a batch."""

    sparse: tuple[SparseRequest, ...]
    stock: tuple[StockSpan, ...]
    sparse_tokens: int
    dense_tokens: int  # of prefills; decoding rows count as neither


def split_step(requests: StepRequests, policy: DensePolicy) -> StepSplit:
    """Split a step: long chunks run sparse, unless their requests chose dense attention; other rows run stock."""
    starts, prompt_lens = requests.starts, requests.prompt_lens
    seq_lens = [0] * (len(starts) - 1) if requests.seq_lens is None else requests.seq_lens
    sparse: list[SparseRequest] = []
    stock: list[StockSpan] = []
    sparse_tokens = dense_tokens = 0
    for index, (start, stop, seq_len) in enumerate(zip(starts, starts[1:], seq_lens, strict=False)):
        rows = stop - start
        if rows <= 0:
            continue
        prefills = rows > 1 if requests.is_prefilling is None else requests.is_prefilling[index]
        options = (requests.options[index] if index < len(requests.options) else None) or RequestOptions()
        if prefills and not options.dense and seq_len >= rows and policy.size_reason(rows, seq_len) is None:
            prompt_len = int(prompt_lens[index]) if index < len(prompt_lens) else None
            sparse.append(SparseRequest(index, start, stop, seq_len, prompt_len, options.gamma))
            sparse_tokens += rows
            continue
        dense_tokens += rows if prefills else 0
        if stock and stock[-1].stop == start:
            stock[-1] = stock[-1]._replace(end_request=index + 1, stop=stop)
        else:
            stock.append(StockSpan(index, index + 1, start, stop))
    return StepSplit(tuple(sparse), tuple(stock), sparse_tokens, dense_tokens)
