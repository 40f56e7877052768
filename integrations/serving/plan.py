"""Plans which rows of a step run sparse, without waiting for a device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from flexmask.dense_policy import DensePolicy


class SparseRequest(NamedTuple):
    request: int  # index in the batch and in the block table
    start: int  # rows of the packed batch
    stop: int
    tokens: int  # so far, including this chunk

    @property
    def before(self) -> int:
        """Tokens before the chunk."""
        return self.tokens - (self.stop - self.start)


class StockRun(NamedTuple):
    """Neighbouring requests for one call of the engine's kernel."""

    first: int  # request
    last: int  # exclusive
    start: int  # rows
    stop: int


class StepPlan(NamedTuple):
    """All rows of one step, without the requests that pad a batch."""

    sparse: tuple[SparseRequest, ...]
    stock: tuple[StockRun, ...]
    sparse_tokens: int
    dense_tokens: int  # of prefills; decoding rows count as neither


def plan_step(
    starts: Sequence[int], lengths: Sequence[int] | None, policy: DensePolicy, prefilling: Sequence[bool] | None = None
) -> StepPlan:
    """Plan one step from the requests' first rows, the end of the last, and tokens including this step's.

    Without `lengths` all rows run stock. `prefilling` is False for requests that decode or verify guessed tokens; None: more than
    one row means a prefill.
    """
    lengths = [0] * (len(starts) - 1) if lengths is None else lengths
    sparse: list[SparseRequest] = []
    stock: list[StockRun] = []
    run: StockRun | None = None
    sparse_tokens = dense_tokens = 0
    for request, (start, stop, tokens) in enumerate(zip(starts, starts[1:], lengths, strict=False)):
        rows = stop - start
        if rows <= 0:
            continue
        prefills = rows > 1 if prefilling is None else prefilling[request]
        if prefills and tokens >= rows and policy.by_size(rows, tokens) is None:
            sparse.append(SparseRequest(request, start, stop, tokens))
            sparse_tokens += rows
            run = None
            continue
        dense_tokens += rows if prefills else 0
        if run is None:
            run = StockRun(request, request + 1, start, stop)
            stock.append(run)
        else:
            run = stock[-1] = StockRun(run.first, request + 1, run.start, stop)
    return StepPlan(tuple(sparse), tuple(stock), sparse_tokens, dense_tokens)
