"""Sums over the calls of a layer: of those that a run has dropped, and of all of them for its summary."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from flexmask._torch import widest_float
from flexmask.integrations.run_calls import RecordedCall
from flexmask.stats import FlexPrefillStats

# of each layer, and of each block's log line; a server whose reasons name lengths would otherwise gather one for every length
MOST_REASONS = 8
OTHER_REASONS = "other reasons"
# what is summed over the heads and batch rows of sparse calls
SUMS = ("density by pair", "coverage", "query-aware", "hybrid", "served densely")


@dataclass
class LayerTotals:
    """Sums over calls of one layer; those of sparse calls stay on their device until they are read.

    Attributes
    ----------
    calls, dense_calls
        All prefill calls, and those that ran dense.
    heads
        Heads of all batch rows, summed over sparse calls.
    pairs, dense_pairs
        Query-key pairs that causality leaves, summed over all calls and over dense ones.
    reasons
        Calls by the reason for which they ran dense.
    sums
        (5,) in the order of `SUMS`, or None before the first sparse call.
    """

    calls: int = 0
    dense_calls: int = 0
    heads: int = 0
    pairs: float = 0.0
    dense_pairs: float = 0.0
    reasons: dict[str, int] = field(default_factory=dict)
    sums: Tensor | None = None

    def add(self, calls: Sequence[RecordedCall]) -> None:
        """Count `calls` of one layer; reads no value of a tensor."""
        sparse = []
        for call in calls:
            pairs = float(call.stats.density.shape[0] * _pairs(call.q_len, call.kv_len))
            self.calls += 1
            self.pairs += pairs
            if call.stats.dense:
                reason = call.reason or OTHER_REASONS
                known = reason in self.reasons or len(self.reasons) < MOST_REASONS
                reason = reason if known else OTHER_REASONS
                self.reasons[reason] = self.reasons.get(reason, 0) + 1
                self.dense_calls += 1
                self.dense_pairs += pairs
            else:
                self.heads += call.stats.density.numel()
                sparse.append((call.stats, pairs))
        if sparse:
            sums = torch.stack([_sums(stats, pairs) for stats, pairs in sparse]).sum(0)
            self.sums = sums if self.sums is None else self.sums.to(sums.device) + sums

    def with_calls(self, calls: Sequence[RecordedCall]) -> LayerTotals:
        """The sums over these calls and `calls`."""
        both = replace(self, reasons=dict(self.reasons))
        both.add(calls)
        return both


def _pairs(q_len: int, kv_len: int) -> int:
    """Pairs of a chunk's rows and the keys up to them; 1 where the lengths are not known."""
    return max(1, q_len * kv_len - q_len * (q_len - 1) // 2)


def _sums(stats: FlexPrefillStats, pairs: float) -> Tensor:
    hybrid = ~stats.row_coverage.isnan()
    density = stats.density * (pairs / stats.density.numel())
    each = (density, stats.coverage, stats.is_query_aware & ~hybrid, hybrid, stats.is_dense)
    return torch.stack([x.to(widest_float(x.device)) for x in each]).sum((1, 2))
