"""Recorded calls, their rows per head, and their sums per layer."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flexmask.base.scores import widest_float
from flexmask.stats import TENSORS, SelectionStats

MAX_REASONS = 8  # per layer and per log line: reasons contain lengths, so a server would collect ever more
OTHER_REASONS = "other reasons"
DENSE_HEAD = "dense attention is faster for the heads of its KV head"


class HeadSums(NamedTuple):
    """Sums over the heads and batch rows of sparse calls."""

    pairs: Any  # causal query-key pairs that are kept
    coverage: Any
    row_coverage: Any
    query_aware: Any  # heads by pattern; a head without a pattern counts in neither sum
    vertical_slash: Any
    dense_heads: Any
    heads_with_tokens: Any  # heads of batch rows that are not padding alone


class CallSize(NamedTuple):
    """The sizes of one call, 0 where unknown."""

    batch: int = 0
    q_len: int = 0
    seq_len: int = 0  # tokens so far, `GeometryMask.seq_len`
    sequence: int = 0  # index in a pack

    @property
    def pairs(self) -> int:
        """Causal query-key pairs of a batch row; 1 for unknown lengths."""
        return max(1, self.q_len * self.seq_len - self.q_len * (self.q_len - 1) // 2)


class RecordedCall(NamedTuple):
    """One prefill call of one layer."""

    stats: SelectionStats
    reason: str | None  # why the call ran dense; None if it ran sparse
    prefill: int  # index of the prefill that it belongs to
    size: CallSize


def on_host(tensors: Iterable[Tensor]) -> dict[int, Tensor]:
    """Copies on the CPU, in their dtypes and shapes, by id; waits once per device."""
    by_device: dict[torch.device, list[Tensor]] = {}
    for tensor in tensors:
        by_device.setdefault(tensor.device, []).append(tensor)
    copies: dict[int, Tensor] = {}
    for device, group in by_device.items():
        values = torch.cat([tensor.detach().flatten().to(widest_float(device)) for tensor in group]).cpu()
        for tensor, copy in zip(group, values.split([tensor.numel() for tensor in group]), strict=True):
            copies[id(tensor)] = copy.view(tensor.shape).to(tensor.dtype)
    return copies


def rows_by_head(calls: Mapping[int, Sequence[RecordedCall]], method: str) -> list[dict[str, Any]]:
    """The rows of `PrefillRun.rows`. The pattern of a head without one is the method's name."""
    copies = on_host(getattr(call.stats, name) for recorded in calls.values() for call in recorded for name in TENSORS)
    rows = []
    for layer, recorded in sorted(calls.items()):
        for stats, reason, prefill, size in recorded:
            numbers = {name: copies[id(getattr(stats, name))].tolist() for name in TENSORS}
            for batch, head in itertools.product(*map(range, stats.density.shape)):
                statistics = {name: by_head[batch][head] for name, by_head in numbers.items()}
                is_dense, is_query_aware = statistics.pop("dense_heads"), statistics.pop("is_query_aware")
                if stats.dense:
                    pattern = "dense"
                elif math.isnan(statistics["js_distance"]):
                    pattern = method
                else:
                    pattern = "query-aware" if is_query_aware else "vertical-slash"
                place = {"layer": layer, "call": prefill, "sequence": size.sequence, "batch": batch, "head": head}
                lengths = {"q_len": size.q_len, "seq_len": size.seq_len}
                row_reason = DENSE_HEAD if reason is None and is_dense else reason
                rows.append({**place, "pattern": pattern, **statistics, **lengths, "reason": row_reason})
    return rows


def finite(value: Any) -> Any:
    """The value with None for floats that are not finite, which JSON lacks; tuples become lists."""
    if isinstance(value, dict):
        return {name: finite(part) for name, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


@dataclass
class LayerTotals:
    """Sums over calls of one layer; sums over sparse calls stay on their device until they are read."""

    calls: int = 0
    dense_calls: int = 0
    heads: int = 0  # of all batch rows in sparse calls
    pairs: float = 0.0  # causal, of query and key
    dense_pairs: float = 0.0
    reasons: dict[str, int] = field(default_factory=dict)
    sums: Tensor | None = None  # the fields of `HeadSums`
    # by head, over calls, batch rows and query blocks: the least share of its rows' attention in kept blocks; inf if never known
    lowest_coverage: Tensor | None = None

    def add(self, calls: Sequence[RecordedCall]) -> None:
        """Count `calls` of one layer without reading a tensor."""
        sparse_sums, coverage = [], [] if self.lowest_coverage is None else [self.lowest_coverage]
        for call in calls:
            pairs = float(call.stats.density.shape[0] * call.size.pairs)
            self.calls += 1
            self.pairs += pairs
            if call.stats.dense:
                reason = call.reason or OTHER_REASONS
                reason = reason if reason in self.reasons or len(self.reasons) < MAX_REASONS else OTHER_REASONS
                self.reasons[reason] = self.reasons.get(reason, 0) + 1
                self.dense_calls += 1
                self.dense_pairs += pairs
            else:
                self.heads += call.stats.density.numel()
                sparse_sums.append(_sums(call.stats, pairs))
                coverage.append(_lowest_coverage(call.stats))
        if sparse_sums:
            sums = torch.stack(sparse_sums).sum(0)
            self.sums = sums if self.sums is None else self.sums.to(sums.device) + sums
            self.lowest_coverage = torch.stack([call_coverage.to(sums.device) for call_coverage in coverage]).amin(0)

    def with_calls(self, calls: Sequence[RecordedCall]) -> LayerTotals:
        """A copy that also counts `calls`."""
        totals = replace(self, reasons=dict(self.reasons))
        totals.add(calls)
        return totals


def _sums(stats: SelectionStats, pairs: float) -> Tensor:
    has_pattern = ~stats.js_distance.isnan()
    query_aware, vertical_slash = stats.is_query_aware & has_pattern, ~stats.is_query_aware & has_pattern
    kept_pairs = stats.density * (pairs / stats.density.numel())
    # heads of batch rows that are padding alone have density 0
    shares = (kept_pairs, stats.coverage, stats.row_coverage)
    sums = HeadSums(*shares, query_aware, vertical_slash, stats.dense_heads, stats.density > 0)
    return torch.stack([numbers.to(widest_float(numbers.device)) for numbers in sums]).sum((1, 2))


def _lowest_coverage(stats: SelectionStats) -> Tensor:
    """The least coverage of each head, (num_heads,), inf if unknown: of all rows by evidence, else of the last rows."""
    coverage = torch.where(stats.min_row_coverage.isnan(), stats.coverage, stats.min_row_coverage)
    return torch.where(stats.dense_heads | coverage.isnan() | (stats.density == 0), math.inf, coverage).amin(0)
