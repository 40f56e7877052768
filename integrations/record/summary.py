"""Recorded calls as rows per head and as sums per layer."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flexmask.base.scores import widest_float
from flexmask.stats import TENSORS, SelectionStats

# per layer and per log line: a server's reasons name lengths
MOST_REASONS = 8
OTHER_REASONS = "other reasons"
# heads whose kept blocks hold less of some rows' attention are named
LOW_COVERAGE = 0.25
# in the text
MOST_LOW_HEADS = 8
DENSE_HEAD = "dense attention is faster for the heads of its key head"


class HeadSums(NamedTuple):
    """Sums over the heads and batch rows of sparse calls."""

    pairs: Any  # causal query-key pairs that are kept
    coverage: Any
    query_aware: Any  # heads; those without a pattern are neither
    vertical_slash: Any
    served_densely: Any


class CallSize(NamedTuple):
    """The sizes of one call, 0 where unknown."""

    batch: int = 0
    q_len: int = 0
    kv_len: int = 0  # `PrefillMask.tokens`
    sequence: int = 0  # in a pack


class RecordedCall(NamedTuple):
    stats: SelectionStats
    reason: str | None  # for running dense
    prefill: int  # from 0
    size: CallSize


Calls = Mapping[int, Sequence[RecordedCall]]


def on_host(tensors: Iterable[Tensor]) -> dict[int, Tensor]:
    """Copies on the CPU, in their dtypes and shapes, by id; waits once per device."""
    by_device: dict[torch.device, list[Tensor]] = {}
    copies: dict[int, Tensor] = {}
    for tensor in tensors:
        copies[id(tensor)] = tensor
        if tensor.device.type != "cpu":
            by_device.setdefault(tensor.device, []).append(tensor)
    for device, group in by_device.items():
        together = torch.cat([tensor.detach().flatten().to(widest_float(device)) for tensor in group]).cpu()
        for tensor, copy in zip(group, together.split([tensor.numel() for tensor in group]), strict=True):
            copies[id(tensor)] = copy.view(tensor.shape).to(tensor.dtype)
    return copies


def calls_on_host(calls: Calls) -> dict[int, list[RecordedCall]]:
    """The calls with their statistics on the CPU."""
    copies = on_host(getattr(call.stats, name) for layer in calls.values() for call in layer for name in TENSORS)

    def copied(stats: SelectionStats) -> SelectionStats:
        tensors: dict[str, Any] = {name: copies[id(getattr(stats, name))] for name in TENSORS}
        return replace(stats, **tensors)

    return {layer: [call._replace(stats=copied(call.stats)) for call in recorded] for layer, recorded in calls.items()}


def rows_of(calls: Calls, method: str) -> list[dict[str, Any]]:
    rows = []
    for layer, recorded in sorted(calls_on_host(calls).items()):
        for stats, reason, prefill, size in recorded:
            numbers = {name: getattr(stats, name).tolist() for name in TENSORS}
            for batch in range(stats.density.shape[0]):
                for head in range(stats.density.shape[1]):
                    statistics = {name: values[batch][head] for name, values in numbers.items()}
                    is_dense, is_query_aware = statistics.pop("is_dense"), statistics.pop("is_query_aware")
                    pattern = "query-aware" if is_query_aware else "vertical-slash"
                    if stats.dense:
                        pattern = "dense"
                    elif statistics["js_distance"] != statistics["js_distance"]:  # NaN
                        pattern = method
                    place = {"layer": layer, "call": prefill, "sequence": size.sequence, "batch": batch, "head": head}
                    lengths = {"q_len": size.q_len, "kv_len": size.kv_len}
                    why = DENSE_HEAD if reason is None and is_dense else reason
                    rows.append({**place, "pattern": pattern, **statistics, **lengths, "reason": why})
    return rows


@dataclass
class LayerTotals:
    """Sums over calls of one layer; those of sparse calls stay on their device until read.

    `heads` counts heads of all batch rows in sparse calls, `pairs` causal query-key pairs; `sums` holds the fields of `HeadSums`.
    """

    calls: int = 0
    dense_calls: int = 0
    heads: int = 0
    pairs: float = 0.0
    dense_pairs: float = 0.0
    reasons: dict[str, int] = field(default_factory=dict)
    sums: Tensor | None = None
    # by head, over calls, batch rows and query blocks: the least share of its rows' attention that was kept; inf if never known
    held: Tensor | None = None

    def add(self, calls: Sequence[RecordedCall]) -> None:
        """Count `calls` of one layer without reading a tensor."""
        sparse, held = [], [] if self.held is None else [self.held]
        for call in calls:
            pairs = float(call.stats.density.shape[0] * _pairs(call.size))
            self.calls += 1
            self.pairs += pairs
            if call.stats.dense:
                reason = call.reason or OTHER_REASONS
                reason = reason if reason in self.reasons or len(self.reasons) < MOST_REASONS else OTHER_REASONS
                self.reasons[reason] = self.reasons.get(reason, 0) + 1
                self.dense_calls += 1
                self.dense_pairs += pairs
            else:
                self.heads += call.stats.density.numel()
                sparse.append(_sums(call.stats, pairs))
                held.append(_held(call.stats))
        if sparse:
            sums = torch.stack(sparse).sum(0)
            self.sums = sums if self.sums is None else self.sums.to(sums.device) + sums
            self.held = torch.stack([x.to(sums.device) for x in held]).amin(0)

    def with_calls(self, calls: Sequence[RecordedCall]) -> LayerTotals:
        both = replace(self, reasons=dict(self.reasons))
        both.add(calls)
        return both


def _pairs(size: CallSize) -> int:
    """1 for unknown lengths."""
    return max(1, size.q_len * size.kv_len - size.q_len * (size.q_len - 1) // 2)


def _sums(stats: SelectionStats, pairs: float) -> Tensor:
    has_pattern = ~stats.js_distance.isnan()
    query_aware, vertical_slash = stats.is_query_aware & has_pattern, ~stats.is_query_aware & has_pattern
    kept = stats.density * (pairs / stats.density.numel())
    sums = HeadSums(kept, stats.coverage, query_aware, vertical_slash, stats.is_dense)
    return torch.stack([x.to(widest_float(x.device)) for x in sums]).sum((1, 2))


def _held(stats: SelectionStats) -> Tensor:
    """The least share of its rows' attention per head, (num_heads,): of all rows by evidence, else of the last rows."""
    held = torch.where(stats.least_row_coverage.isnan(), stats.coverage, stats.least_row_coverage)
    return torch.where(stats.is_dense | held.isnan(), math.inf, held).amin(0)


class LowHead(NamedTuple):
    """A head that keeps little of some rows' attention."""

    layer: int
    head: int
    held: float


@dataclass(frozen=True)
class LayerSummary:
    """One layer of a run, over all its prefill calls.

    Attributes
    ----------
    calls, dense_calls
        Prefill calls, and those that ran dense.
    reasons
        Calls by the reason for running dense.
    density
        Share of the causal query-key pairs that the masks keep: mean over calls weighted by their pairs. Dense calls, which have
        no mask, count as 1; heads `served_densely` count by their mask, as in `tune` and in `flexmask.SelectionStats`.
    coverage
        Attention of the representative rows that the kept blocks hold, mean over the heads of sparse calls; None without one.
    lowest
        The least share of some rows' attention that a head keeps, over sparse calls, batch rows and heads that were not
        served densely. Rows are those of each query block, by hybrid's evidence (`least_row_coverage`), else the representative
        ones. None if no mask tells.
    patterns
        Share of the heads of sparse calls by pattern, or by the method's name if it has none.
    served_densely
        Share of the heads of sparse calls that ran dense because that is faster.
    """

    layer: int
    calls: int
    dense_calls: int
    reasons: dict[str, int]
    density: float
    coverage: float | None
    patterns: dict[str, float]
    served_densely: float
    lowest: float | None = None

    @property
    def ran(self) -> str:
        """``"sparse"``, ``"dense"`` or ``"both"``, as its calls ran."""
        return "sparse" if self.dense_calls == 0 else "dense" if self.dense_calls == self.calls else "both"


@dataclass(frozen=True, repr=False)
class RunSummary:
    """A run over all its prefill calls, dropped ones included. ``print`` shows a line per layer.

    Attributes
    ----------
    prefills, sequences, tokens
        Forward passes of more than one token, the batch rows and packed sequences that they read, and the tokens of all of them,
        padding included. A prompt in three chunks counts as three prefills and three sequences.
    density
        As that of a layer, over all layers.
    dropped_calls
        Calls counted here that `max_calls` dropped.
    """

    prefills: int
    tokens: int
    density: float | None
    layers: tuple[LayerSummary, ...]
    dropped_calls: int = 0
    low_heads: tuple[LowHead, ...] = ()
    sequences: int = 0

    @property
    def warning(self) -> str | None:
        """One line that names the heads that keep least of some rows' attention, None without any below `LOW_COVERAGE`."""
        if not self.low_heads:
            return None
        named = ", ".join(f"layer {layer} head {head} {held:.0%}" for layer, head, held in self.low_heads[:MOST_LOW_HEADS])
        more = f" and {len(self.low_heads) - MOST_LOW_HEADS} more" if len(self.low_heads) > MOST_LOW_HEADS else ""
        return f"heads that keep less than {LOW_COVERAGE:.0%} of some rows' attention: {named}{more}"

    def to_dict(self) -> dict[str, Any]:
        """The same in JSON types."""
        layers = [{**asdict(layer), "ran": layer.ran} for layer in self.layers]
        heads = [head._asdict() for head in self.low_heads]
        return {**{name: value for name, value in vars(self).items() if name != "layers"}, "layers": layers, "low_heads": heads}

    def __repr__(self) -> str:
        sparse = sum(layer.ran != "dense" for layer in self.layers)
        density = "" if self.density is None else f", density {self.density:.1%}"
        prefills = f"{self.prefills:,} prefill{'' if self.prefills == 1 else 's'}"
        if self.sequences > self.prefills:
            prefills += f" of {self.sequences:,} sequences"
        prefills += f", {self.tokens:,} tokens in all"
        return f"<RunSummary: {prefills}{density}, {sparse} of {len(self.layers)} layers sparse>"

    def __str__(self) -> str:
        if not self.layers:
            return repr(self)
        rows: list[tuple[str, ...]] = [("layer", "ran", "density", "coverage", "lowest", "heads", "dense because")]
        for layer in self.layers:
            coverage, lowest = ("-" if share is None else f"{share:.1%}" for share in (layer.coverage, layer.lowest))
            heads = ", ".join(f"{share:.0%} {pattern}" for pattern, share in layer.patterns.items())
            if layer.served_densely:
                heads += f" ({layer.served_densely:.0%} served by dense attention, faster there)"
            often = f" ({layer.dense_calls:,} of {layer.calls:,} calls dense)" if layer.ran == "both" else ""
            reasons = "; ".join(sorted(layer.reasons, key=lambda reason: -layer.reasons[reason])[:2])
            rows.append((str(layer.layer), layer.ran + often, f"{layer.density:.1%}", coverage, lowest, heads or "-", reasons))
        if not any(layer.reasons for layer in self.layers):
            rows = [row[:-1] for row in rows]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        warning = [] if self.warning is None else [self.warning]
        return "\n".join([repr(self)[1:-1].removeprefix("RunSummary: "), *lines, *warning])


def summary_of(
    totals: Mapping[int, LayerTotals], method: str, prefills: int, sequences: int, tokens: int, dropped_calls: int
) -> RunSummary:
    """The summary of some layers; waits once per device."""
    copies = on_host(tensor for total in totals.values() for tensor in (total.sums, total.held) if tensor is not None)
    layers, low = [], []
    for layer, total in sorted(totals.items()):
        sums = HeadSums(*([0.0] * len(HeadSums._fields) if total.sums is None else copies[id(total.sums)].tolist()))
        held: list[float] = [] if total.held is None else copies[id(total.held)].tolist()
        low += [LowHead(layer, head, share) for head, share in enumerate(held) if share < LOW_COVERAGE]
        heads, least = max(total.heads, 1), min(held, default=math.inf)
        shares = {"query-aware": sums.query_aware / heads, "vertical-slash": sums.vertical_slash / heads}
        shares[method] = 1 - sum(shares.values())
        layers.append(
            LayerSummary(
                layer,
                total.calls,
                total.dense_calls,
                dict(total.reasons),
                (sums.pairs + total.dense_pairs) / total.pairs,
                None if total.heads == 0 or math.isnan(sums.coverage) else sums.coverage / heads,
                {name: share for name, share in shares.items() if share > 0 and total.heads},
                sums.served_densely / heads,
                None if least == math.inf else least,
            )
        )
    pairs = sum(total.pairs for total in totals.values())
    kept = sum(summary.density * totals[summary.layer].pairs for summary in layers)
    low.sort(key=lambda head: head.held)
    return RunSummary(prefills, tokens, kept / pairs if pairs else None, tuple(layers), dropped_calls, tuple(low), sequences)
