"""The summary of a run: per layer how it ran, what its masks keep, and which heads keep little."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from flexmask.integrations.record.calls import HeadSums, LayerTotals, on_host

LOW_COVERAGE = 0.25  # heads with less coverage of some rows are named
MAX_LOW_HEADS = 8  # in the text


class LowHead(NamedTuple):
    """A head whose coverage of some rows is low."""

    layer: int
    head: int
    coverage: float  # the lowest of its rows


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
        Kept share of the visible blocks: mean over calls weighted by their query-key pairs. Dense calls, which have
        no mask, count as 1; heads that ran dense count by their mask, as in `flexmask.SelectionStats`.
    coverage, row_coverage
        Attention of the representative rows, and by hybrid's evidence of all rows, that the kept blocks hold, as in
        `flexmask.SelectionStats`: means over the heads of sparse calls, without batch rows of padding alone; None without one.
    lowest
        Lowest coverage of a head's rows in sparse calls, without heads that ran dense: by query block (`min_row_coverage`),
        else of the representative rows. None if unknown.
    patterns
        Share of the heads of sparse calls by pattern, or by the method's name if it has none.
    dense_heads
        Share of the heads of sparse calls that ran dense because that is faster.
    """

    layer: int
    calls: int
    dense_calls: int
    reasons: dict[str, int]
    density: float
    coverage: float | None
    patterns: dict[str, float]
    dense_heads: float
    lowest: float | None = None
    row_coverage: float | None = None

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
    density, dropped_calls
        As that of a layer, over all layers; calls counted here that `max_calls` dropped.
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
        heads = ", ".join(f"layer {layer} head {head} {share:.0%}" for layer, head, share in self.low_heads[:MAX_LOW_HEADS])
        ending = f" and {len(self.low_heads) - MAX_LOW_HEADS} more" if len(self.low_heads) > MAX_LOW_HEADS else ""
        return f"heads that keep less than {LOW_COVERAGE:.0%} of some rows' attention: {heads}{ending}"

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
        # `coverage` is of the last rows, and 100% where these are dense
        name = "coverage" if all(layer.row_coverage is None for layer in self.layers) else "row_coverage"
        rows: list[tuple[str, ...]] = [("layer", "ran", "density", name, "lowest", "heads", "dense because")]
        for layer in self.layers:
            coverage, lowest = ("-" if share is None else f"{share:.1%}" for share in (getattr(layer, name), layer.lowest))
            heads = ", ".join(f"{share:.0%} {pattern}" for pattern, share in layer.patterns.items())
            if layer.dense_heads:
                heads += f" ({layer.dense_heads:.0%} ran dense, which is faster there)"
            dense_calls = f" ({layer.dense_calls:,} of {layer.calls:,} calls dense)" if layer.ran == "both" else ""
            reasons = "; ".join(sorted(layer.reasons, key=lambda reason: -layer.reasons[reason])[:2])
            rows.append(
                (str(layer.layer), layer.ran + dense_calls, f"{layer.density:.1%}", coverage, lowest, heads or "-", reasons)
            )
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
    copies = on_host(tensor for total in totals.values() for tensor in (total.sums, total.lowest_coverage) if tensor is not None)
    layers, low_heads = [], []
    for layer, total in sorted(totals.items()):
        sums = HeadSums(*([0.0] * len(HeadSums._fields) if total.sums is None else copies[id(total.sums)].tolist()))
        by_head: list[float] = [] if total.lowest_coverage is None else copies[id(total.lowest_coverage)].tolist()
        low_heads += [LowHead(layer, head, share) for head, share in enumerate(by_head) if share < LOW_COVERAGE]
        heads, lowest = max(total.heads, 1), min(by_head, default=math.inf)
        shares = {"query-aware": sums.query_aware / heads, "vertical-slash": sums.vertical_slash / heads}
        shares[method] = 1 - sum(shares.values())
        density = (sums.pairs + total.dense_pairs) / total.pairs
        coverage, row_coverage = (
            None if sums.heads_with_tokens == 0 or math.isnan(share) else share / sums.heads_with_tokens
            for share in (sums.coverage, sums.row_coverage)
        )
        patterns = {name: share for name, share in shares.items() if share > 0 and total.heads}
        calls = (total.calls, total.dense_calls, dict(total.reasons))
        known_lowest = None if lowest == math.inf else lowest
        dense_heads = sums.dense_heads / heads
        layers.append(LayerSummary(layer, *calls, density, coverage, patterns, dense_heads, known_lowest, row_coverage))
    pairs = sum(total.pairs for total in totals.values())
    kept_pairs = sum(summary.density * totals[summary.layer].pairs for summary in layers)
    low_heads.sort(key=lambda head: head.coverage)
    density_of_all = kept_pairs / pairs if pairs else None
    return RunSummary(prefills, tokens, density_of_all, tuple(layers), dropped_calls, tuple(low_heads), sequences)
