"""Splits the rows of a scheduler's step into sparse requests and stock spans, without waiting for a device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from flexmask.dense_policy import DensePolicy
from flexmask.integrations.serving.options import RequestOptions
from flexmask.plans import Plan


@dataclass(frozen=True)
class SparseRequest:
    batch_index: int  # in the block table too
    start: int  # rows of the packed batch
    stop: int
    seq_len: int  # tokens so far, including this chunk
    prompt_len: int | None = None  # tokens of its prompt; None: no more
    gamma: float | None = None  # the request's; None: the server's
    # of its attention, by kind of layer (`attend_chunk`)
    plans: dict[Any, Plan] = field(default_factory=dict, compare=False)

    @property
    def cached_len(self) -> int:
        """Tokens before the chunk."""
        return self.seq_len - (self.stop - self.start)


class StockSpan(NamedTuple):
    """Neighbouring requests for one call of the engine's kernel."""

    first: int  # request
    last: int  # exclusive
    start: int  # rows
    stop: int


class StepSplit(NamedTuple):
    """All rows of one step, without the requests that pad a batch."""

    sparse: tuple[SparseRequest, ...]
    stock: tuple[StockSpan, ...]
    sparse_tokens: int
    dense_tokens: int  # of prefills; decoding rows count as neither


def split_step(
    query_start_loc: Sequence[int], seq_lens: Sequence[int] | None, policy: DensePolicy,
    is_prefilling: Sequence[bool] | None = None, requested: Sequence[RequestOptions | None] = (),
    prompt_lens: Sequence[int] = (),
) -> StepSplit:  # fmt: skip
    """Split one step from the requests' first rows, the end of the last, and tokens including this step's.

    Without `seq_lens` all rows run stock. `is_prefilling` is False for requests that decode or verify guessed tokens; None: more
    than one row means a prefill. `requested` are the options of the first requests and `prompt_lens` the tokens of their prompts;
    padding has none.
    """
    seq_lens = [0] * (len(query_start_loc) - 1) if seq_lens is None else seq_lens
    sparse: list[SparseRequest] = []
    stock: list[StockSpan] = []
    sparse_tokens = dense_tokens = 0
    for index, (start, stop, seq_len) in enumerate(zip(query_start_loc, query_start_loc[1:], seq_lens, strict=False)):
        rows = stop - start
        if rows <= 0:
            continue
        prefills = rows > 1 if is_prefilling is None else is_prefilling[index]
        options = (requested[index] if index < len(requested) else None) or RequestOptions()
        if prefills and not options.dense and seq_len >= rows and policy.by_size(rows, seq_len) is None:
            prompt_len = int(prompt_lens[index]) if index < len(prompt_lens) else None
            sparse.append(SparseRequest(index, start, stop, seq_len, prompt_len, options.gamma))
            sparse_tokens += rows
            continue
        dense_tokens += rows if prefills else 0
        if stock and stock[-1].stop == start:
            stock[-1] = stock[-1]._replace(last=index + 1, stop=stop)
        else:
            stock.append(StockSpan(index, index + 1, start, stop))
    return StepSplit(tuple(sparse), tuple(stock), sparse_tokens, dense_tokens)
