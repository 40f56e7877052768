"""Serves the attention calls of an inspected prefill: records them, or times them and looks at heads."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from flexmask.base.inputs import AttentionInputs, HeadGroup
from flexmask.flex.block_mask import block_mask
from flexmask.flex.head_groups import head_bytes, head_groups
from flexmask.integrations.inspection_heads import ChosenHead
from flexmask.integrations.inspection_maps import block_attention
from flexmask.integrations.route import PrefillCall, reason_dense_layer, reason_no_mask, route
from flexmask.integrations.run import FlexPrefillRun
from flexmask.search import search

HOW_TIMED = (
    "Of a second prefill of the same prompt, in which nothing compiles and no statistics are taken. Attention and selection are "
    "timed in each layer, waiting for the device before and after; selection alone is timed by making the layer's masks once "
    "more, and is taken off attention. The rest is the forward pass without either: projections, MLPs, norms, embeddings."
)
# called with the layers done and all layers to do
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class LayerTime:
    """Seconds of one layer's attention call: all of it, and making the masks alone, 0 where it ran dense."""

    layer: int
    call: float
    selection: float


@dataclass(frozen=True)
class StageTimes:
    """Seconds of one prefill by stage; see `HOW_TIMED`."""

    total: float
    layers: tuple[LayerTime, ...]

    @property
    def stages(self) -> dict[str, float]:
        """Seconds of selection, attention and the rest."""
        call, selection = (sum(getattr(each, name) for each in self.layers) for name in ("call", "selection"))
        # the same masks made twice may take longer the second time
        return {"selection": selection, "attention": max(0.0, call - selection), "rest": max(0.0, self.total - call)}


class Looker:
    """Serves each call of a prefill; in the second one, times it and looks at heads."""

    def __init__(self, progress: Progress, of: int) -> None:
        self._progress, self._of, self._done = progress, of, 0
        self.maps: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        self.times: dict[int, LayerTime] = {}
        self.not_counted = 0.0

    def begin(self, record: FlexPrefillRun, chosen: list[ChosenHead]) -> None:
        """Record into `record` from now on; without statistics, time and look at the heads `chosen` too."""
        self._record, self._chosen = record, chosen

    def __call__(self, call: PrefillCall) -> Tensor:
        record = self._record
        call = call._replace(run=record)
        if record.collect_stats:
            out = route(call)
        else:
            start = time.perf_counter()
            out, own = self._timed(call)
            self.not_counted += time.perf_counter() - start - own
        self._done += 1
        self._progress(min(self._done, self._of), self._of)
        return out

    def _timed(self, call: PrefillCall) -> tuple[Tensor, float]:
        """The output of a call, and the seconds that it took without what is only looked at."""
        sparse = reason_no_mask(call) is None and reason_dense_layer(call) is None
        inputs = call.inputs.with_gamma(call.config.gamma).detached().placed()
        device = inputs.query.device
        if sparse and device.type != "cpu":
            _select(inputs, call)  # compiles the search without statistics
        wait(device)
        start = time.perf_counter()
        out = route(call)
        wait(device)
        own = time.perf_counter() - start
        selection = 0.0
        if sparse:
            start = time.perf_counter()
            _select(inputs, call)
            wait(device)
            selection = time.perf_counter() - start
            for head in self._chosen:
                if head.layer == call.layer and head[:2] not in self.maps:
                    self.maps[head[:2]] = _looked_at(inputs, call, head.head)
        # a layer may call attention more than once
        before = self.times.get(call.layer, LayerTime(call.layer, 0.0, 0.0))
        self.times[call.layer] = LayerTime(call.layer, before.call + own, before.selection + selection)
        return out, own


def _select(inputs: AttentionInputs, call: PrefillCall) -> None:
    """Make the masks of all heads, group by group as attention does, and drop them."""
    at_once = call.settings.max_mask_bytes // head_bytes(inputs, call.config)
    for group in head_groups(1, inputs.query.shape[1], inputs.key.shape[1], at_once):
        part = inputs.of_heads(group)
        block_mask(part, search(part, call.config).lists, None, call.config.block_size)


def _looked_at(inputs: AttentionInputs, call: PrefillCall, head: int) -> tuple[Tensor, Tensor]:
    """The true attention of one head by blocks, and the blocks that it keeps."""
    key_head = head * inputs.key.shape[1] // inputs.query.shape[1]
    one = inputs.of_heads(HeadGroup(slice(0, 1), slice(head, head + 1), slice(key_head, key_head + 1)))
    keep = search(one, call.config, with_keep=True).keep
    assert keep is not None
    return block_attention(one, call.config.block_size), keep[0, 0].cpu()


def wait(device: torch.device) -> None:
    """Wait until a device has done all that it was given."""
    if device.type != "cpu":
        torch.get_device_module(device).synchronize(device)
