"""Records or times the attention calls of an inspected prefill."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from flexmask import plain
from flexmask.attend import RunOptions
from flexmask.base.blocks import cut_into_blocks
from flexmask.base.inputs import AttentionInputs, HeadGroup
from flexmask.flex.block_mask import block_mask
from flexmask.flex.head_groups import head_groups
from flexmask.integrations.huggingface.call import PrefillCall
from flexmask.integrations.inspect.attention_held import block_attention, held_by_quarter
from flexmask.integrations.inspect.heads import ChosenHead
from flexmask.integrations.record import PrefillRun
from flexmask.precision import without_autocast
from flexmask.select import select_blocks
from flexmask.selector import Selector

HOW_TIMED = (
    "Of a second prefill of the same prompt, in which nothing compiles and no statistics are taken. Each layer's attention call "
    "is timed, waiting for the device before and after. Selection is timed by making the layer's masks once more, and subtracted "
    "from attention. The rest is the forward pass without both: projections, MLPs, norms, embeddings."
)
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class LayerTime:
    """Seconds of one layer's attention call, and of making its masks."""

    layer: int
    call: float
    selection: float


@dataclass(frozen=True)
class StageTimes:
    """Seconds of one prefill; see `HOW_TIMED`."""

    total: float
    layers: tuple[LayerTime, ...]

    @property
    def stages(self) -> dict[str, float]:
        call, selection = (sum(getattr(each, name) for each in self.layers) for name in ("call", "selection"))
        # making the masks again may take longer
        return {"selection": selection, "attention": max(0.0, call - selection), "rest": max(0.0, self.total - call)}


class InspectionProbe:
    """Serves two prefills; times the second and compares its masks with true attention."""

    def __init__(self, progress: Progress, of: int) -> None:
        self._progress, self._of, self._done = progress, of, 0
        self.maps: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        self.held: dict[int, Tensor] = {}  # by layer, (num_heads, 4)
        self.times: dict[int, LayerTime] = {}
        self.not_counted = 0.0

    def begin(self, record: PrefillRun, chosen: list[ChosenHead]) -> None:
        """Without statistics, also time the calls and compare the heads `chosen`."""
        self._record, self._chosen = record, chosen

    def __call__(self, call: PrefillCall) -> Tensor:
        call = call._replace(run=self._record, probe=None)
        if self._record.collect_stats:
            out = call.attention()
        else:
            start = time.perf_counter()
            out, own = self._timed(call)
            self.not_counted += time.perf_counter() - start - own
        self._done += 1
        self._progress(min(self._done, self._of), self._of)
        return out

    def _timed(self, call: PrefillCall) -> tuple[Tensor, float]:
        """The output, and seconds without the comparison."""
        sparse = call.reason_dense() is None
        inputs, device = call.inputs.with_fields(needs_grad=False), call.inputs.query.device
        if sparse and device.type != "cpu":
            _select(inputs, call)  # compiles
        wait(device)
        start = time.perf_counter()
        out = call.attention()
        wait(device)
        own = time.perf_counter() - start
        selection = 0.0
        if sparse:
            start = time.perf_counter()
            _select(inputs, call)
            wait(device)
            selection = time.perf_counter() - start
            self._compare(inputs, call)
        before = self.times.get(call.layer, LayerTime(call.layer, 0.0, 0.0))
        self.times[call.layer] = LayerTime(call.layer, before.call + own, before.selection + selection)
        return out, own

    def _compare(self, inputs: AttentionInputs, call: PrefillCall) -> None:
        held = []
        for part, group, keep in _maps(inputs, call):
            held.append(held_by_quarter(part, keep, call.selector.block_size))
            for head in self._chosen:
                if head.layer == call.layer and head[:2] not in self.maps and group.query.start <= head.head < group.query.stop:
                    number = head.head - group.query.start
                    shared = part.query.shape[1] // part.key.shape[1]
                    one = part.of_heads(
                        HeadGroup(slice(0, 1), slice(number, number + 1), slice(number // shared, number // shared + 1))
                    )
                    self.maps[head[:2]] = (block_attention(one, call.selector.block_size), keep[0, number].cpu())
        self.held[call.layer] = torch.cat(held)


def _groups(inputs: AttentionInputs, selector: Selector, run: RunOptions) -> Iterator[tuple[AttentionInputs, HeadGroup]]:
    at_once = run.max_mask_bytes // selector.head_bytes
    for group in head_groups(inputs.query, inputs.key, at_once, selector.method.shared):
        yield inputs.of_heads(group), group


def select_all(inputs: AttentionInputs, selector: Selector, run: RunOptions) -> None:
    """Make the masks of all heads as attention does."""
    for part, group in _groups(inputs, selector, run):
        block_mask(part, select_blocks(selector, part, group.query))


def _select(inputs: AttentionInputs, call: PrefillCall) -> None:
    with without_autocast(inputs.query.device):
        inputs = inputs.prepared().with_offset()
        select_all(inputs, call.selector.for_inputs(inputs), call.settings.run_options)


def _maps(inputs: AttentionInputs, call: PrefillCall) -> Iterator[tuple[AttentionInputs, HeadGroup, Tensor]]:
    """Groups of heads with the maps of their kept blocks."""
    with without_autocast(inputs.query.device):
        inputs = inputs.prepared().with_offset()
        selector = call.selector.for_inputs(inputs)
        for part, group in _groups(inputs, selector, call.settings.run_options):
            keep = select_blocks(selector, part, group.query, with_map=True).keep
            if keep is None:  # every visible block
                keep = cut_into_blocks(part, selector.block_size, plain).visible
            yield part, group, keep.expand(part.query.shape[0], part.query.shape[1], -1, -1)


def wait(device: torch.device) -> None:
    if device.type != "cpu":
        torch.get_device_module(device).synchronize(device)
