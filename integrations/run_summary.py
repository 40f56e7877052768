"""A run in a few lines: which layers ran sparse, why the others did not, and what was kept."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from flexmask.integrations.run_totals import SUMS, LayerTotals


@dataclass(frozen=True)
class LayerSummary:
    """One layer of a run, over all its prefill calls.

    Attributes
    ----------
    layer
        Layer index.
    calls, dense_calls
        Prefill calls, and those of them that ran dense.
    reasons
        Calls by the reason for which they ran dense.
    density
        Kept share of the query-key pairs that causality leaves: the mean of the calls' densities, each weighted by its pairs,
        calls that ran dense at 1.
    coverage
        Attention of the representative rows that the kept blocks hold, mean over the heads of sparse calls; None without one.
    patterns
        Share of the heads of sparse calls by pattern, those that occur.
    served_densely
        Share of the heads of sparse calls that dense attention served because it is faster.
    """

    layer: int
    calls: int
    dense_calls: int
    reasons: dict[str, int]
    density: float
    coverage: float | None
    patterns: dict[str, float]
    served_densely: float

    @property
    def ran(self) -> str:
        """``"sparse"``, ``"dense"``, or ``"both"``."""
        return "sparse" if self.dense_calls == 0 else "dense" if self.dense_calls == self.calls else "both"


@dataclass(frozen=True, repr=False)
class RunSummary:
    """A run over all its prefill calls, those that it no longer keeps included. ``print`` shows a line a layer.

    Attributes
    ----------
    prefills
        Forward passes of more than one token.
    tokens
        Tokens of these, of all batch rows, padding included.
    density
        As that of a layer, over all layers.
    layers
        In order of their index.
    dropped_calls
        Calls that are counted here, but that `max_calls` no longer lets the run keep.
    """

    prefills: int
    tokens: int
    density: float | None
    layers: tuple[LayerSummary, ...]
    dropped_calls: int = 0

    def to_dict(self) -> dict[str, Any]:
        """Return the same in types that JSON has."""
        layers = [{**asdict(layer), "ran": layer.ran} for layer in self.layers]
        return {**{name: value for name, value in vars(self).items() if name != "layers"}, "layers": layers}

    def __repr__(self) -> str:
        sparse = sum(layer.ran != "dense" for layer in self.layers)
        density = "" if self.density is None else f", density {self.density:.3f}"
        prefills = f"{self.prefills:,} prefill{'' if self.prefills == 1 else 's'} of {self.tokens:,} tokens"
        return f"<RunSummary: {prefills}{density}, {sparse} of {len(self.layers)} layers sparse>"

    def __str__(self) -> str:
        if not self.layers:
            return repr(self)
        rows = [("layer", "ran", "density", "coverage", "heads", "dense because")]
        for layer in self.layers:
            coverage = "-" if layer.coverage is None else f"{layer.coverage:.3f}"
            heads = ", ".join(f"{share:.0%} {pattern}" for pattern, share in layer.patterns.items())
            if layer.served_densely:
                heads += f" ({layer.served_densely:.0%} served by dense attention, faster there)"
            often = f" ({layer.dense_calls:,} of {layer.calls:,} calls dense)" if layer.ran == "both" else ""
            reasons = "; ".join(sorted(layer.reasons, key=lambda reason: -layer.reasons[reason])[:2])
            rows.append((str(layer.layer), layer.ran + often, f"{layer.density:.3f}", coverage, heads or "-", reasons))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        return "\n".join([repr(self)[1:-1].removeprefix("RunSummary: "), *lines])


def summary_of(totals: Mapping[int, LayerTotals], prefills: int, tokens: int, dropped_calls: int) -> RunSummary:
    """The summary of some layers; waits once for each device that their sums are on."""
    sums = _on_host({layer: each.sums for layer, each in totals.items() if each.sums is not None})
    layers = []
    for layer, each in sorted(totals.items()):
        found = dict(zip(SUMS, sums.get(layer, [0.0] * len(SUMS)), strict=True))
        heads = max(each.heads, 1)
        shares = {name: found[name] / heads for name in ("query-aware", "hybrid")}
        shares["vertical-slash"] = 1 - sum(shares.values())
        layers.append(
            LayerSummary(
                layer,
                each.calls,
                each.dense_calls,
                dict(each.reasons),
                (found["density by pair"] + each.dense_pairs) / each.pairs,
                found["coverage"] / heads if each.heads else None,
                {name: share for name, share in shares.items() if share > 0 and each.heads},
                found["served densely"] / heads,
            )
        )
    pairs = sum(each.pairs for each in totals.values())
    kept = sum(summary.density * totals[summary.layer].pairs for summary in layers)
    return RunSummary(prefills, tokens, kept / pairs if pairs else None, tuple(layers), dropped_calls)


def _on_host(sums: Mapping[int, Tensor]) -> dict[int, list[float]]:
    by_device: dict[torch.device, list[int]] = {}
    for layer, each in sums.items():
        by_device.setdefault(each.device, []).append(layer)
    return {
        layer: values
        for layers in by_device.values()
        for layer, values in zip(layers, torch.stack([sums[layer] for layer in layers]).tolist(), strict=True)
    }
