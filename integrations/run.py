"""The record of one model's prefill calls, and which models have one."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn
from torch.nn.attention.flex_attention import BlockMask

from flexmask.integrations.prefill_calls import PrefillCalls
from flexmask.integrations.settings import PrefillSettings
from flexmask.stats import FlexPrefillStats


@dataclass(eq=False)
class FlexPrefillRun:
    """The settings of one model, and what its prefill calls chose.

    Attributes
    ----------
    settings
        The options.
    stats
        By layer index: the statistics of each call of more than one row, in order, of those that verify guessed tokens too.
        Decoding steps of one row leave none, nor does what another method than FlexPrefill chooses; calls that run dense do.
    masks
        By layer index, only with `collect_masks`: the mask of each such call, None for one that ran dense without a mask.
    reasons
        By layer index, one for each entry of `stats`: why the call ran dense, None for one that did not.
    calls
        The layers' numbers, and the prefill that each entry of `stats` belongs to.
    collect_stats, collect_masks
        Whether these are kept.
    """

    settings: PrefillSettings = field(default_factory=PrefillSettings)
    collect_stats: bool = True
    collect_masks: bool = False
    stats: dict[int, list[FlexPrefillStats]] = field(default_factory=dict)
    masks: dict[int, list[BlockMask | None]] = field(default_factory=dict)
    reasons: dict[int, list[str | None]] = field(default_factory=dict)
    calls: PrefillCalls = field(default_factory=PrefillCalls, repr=False)

    def record(
        self,
        layer: int,
        stats: FlexPrefillStats | None,
        mask: BlockMask | None,
        reason: str | None = None,
        prefill: int | None = None,
    ) -> None:
        """Note one prefill call of one layer: its statistics and its mask, if kept, and why it ran dense, if it did.

        `prefill` is the number of its `PrefillMask`.
        """
        if self.collect_stats and stats is not None:
            self.stats.setdefault(layer, []).append(stats)
            self.reasons.setdefault(layer, []).append(reason)
            self.calls.begin(layer, prefill)
        if self.collect_masks:
            self.masks.setdefault(layer, []).append(mask)

    def rows(self) -> list[dict[str, Any]]:
        """One row a layer, prefill call, batch row and head: its pattern, distance, density and coverage."""
        return [
            {
                "layer": layer,
                "call": call,
                "batch": batch,
                "head": head,
                "pattern": "dense" if stats.dense else "query-aware" if stats.is_query_aware[batch, head] else "vertical-slash",
                "distance": float(stats.js_distance[batch, head]),
                "density": float(stats.density[batch, head]),
                "coverage": float(stats.coverage[batch, head]),
            }
            for layer, calls in sorted(self.stats.items())
            for call, stats in zip(self.calls.numbers[layer], calls, strict=True)
            for batch in range(stats.density.shape[0])
            for head in range(stats.density.shape[1])
        ]


# by attention module rather than by config object, which several models may share; of open blocks, and of hooked models
RUNS: WeakKeyDictionary[nn.Module, FlexPrefillRun] = WeakKeyDictionary()
HOOKS: WeakKeyDictionary[nn.Module, FlexPrefillRun] = WeakKeyDictionary()
