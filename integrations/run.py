"""The record of one model's prefill calls, and the runs that are open on each module."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask

from flexmask.integrations.prefill_calls import PrefillCalls
from flexmask.integrations.settings import PrefillSettings
from flexmask.stats import FlexPrefillStats

# several threads may run one model in one block; also held while blocks open and close
LOCK = threading.RLock()
# of each block, for its log line; a server that never ends its hook would otherwise gather one for every length
_MAX_REASONS = 8
# the reason of single heads
DENSE_HEAD = "dense attention is faster for the heads of its key head"


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
    probe
        A function that serves every prefill call instead of `route`, or None: `tune` measures by it.
    padding_is_masked
        True if the caller masks all padding, so that equal tokens at a prompt's end are the prompt's own.
    """

    settings: PrefillSettings = field(default_factory=PrefillSettings)
    collect_stats: bool = True
    collect_masks: bool = False
    stats: dict[int, list[FlexPrefillStats]] = field(default_factory=dict)
    masks: dict[int, list[BlockMask | None]] = field(default_factory=dict)
    reasons: dict[int, list[str | None]] = field(default_factory=dict)
    calls: PrefillCalls = field(default_factory=PrefillCalls, repr=False)
    probe: Callable[[Any], Tensor] | None = field(default=None, repr=False)
    padding_is_masked: bool = False
    # for the log line, whatever is collected: layers that were called, and those that ran dense by the reason
    _called: set[int] = field(default_factory=set, repr=False)
    _sparse: set[int] = field(default_factory=set, repr=False)
    _dense: dict[str, set[int]] = field(default_factory=dict, repr=False)
    _ran: bool = field(default=False, repr=False)
    _is_closed: bool = field(default=False, repr=False)

    def record(
        self,
        layer: int,
        stats: FlexPrefillStats | None,
        mask: BlockMask | None,
        reason: str | None = None,
        prefill: int | None = None,
        sequence: int = 0,
    ) -> None:
        """Note one prefill call of one layer: its statistics and its mask, if kept, and why it ran dense, if it did.

        `prefill` is the number of its `PrefillMask`, `sequence` that of the sequence in a pack.
        """
        # in a compiled forward a lock would break the graph
        with nullcontext() if torch.compiler.is_compiling() else LOCK:
            self._count(layer, reason)
            if self.collect_stats and stats is not None:
                self.stats.setdefault(layer, []).append(stats)
                self.reasons.setdefault(layer, []).append(reason)
                self.calls.begin(layer, prefill, sequence)
            if self.collect_masks:
                self.masks.setdefault(layer, []).append(mask)

    def _count(self, layer: int, reason: str | None) -> None:
        self._called.add(layer)
        if reason is None:
            self._sparse.add(layer)
        elif reason in self._dense or len(self._dense) < _MAX_REASONS:
            self._dense.setdefault(reason, set()).add(layer)

    def note_forward(self) -> None:
        """Note that a forward of more than one token came to its end."""
        self._ran = True

    @property
    def unreached(self) -> bool:
        """True if the model ran, but none of its layers came here."""
        return self._ran and not self._called

    def dense_summary(self) -> tuple[bool, str] | None:
        """Whether every call ran dense, and a line with the dense layers and their reasons; None if none ran dense."""
        if not self._dense:
            return None
        dense = set().union(*self._dense.values())
        number = f"all {len(dense)} layers" if dense == self._called else f"{len(dense)} of {len(self._called)} layers"
        at_times = ", in some calls" if dense & self._sparse else ""
        # the reason of most layers first
        reasons = sorted(self._dense, key=lambda reason: -len(self._dense[reason]))
        more = "; and more" if len(reasons) > 3 else ""
        return not self._sparse, f"{number} ran dense{at_times}: {'; '.join(reasons[:3])}{more}"

    def rows(self) -> list[dict[str, Any]]:
        """One row a layer, prefill call, packed sequence, batch row and head: what it chose, and the `reason` if it ran dense.

        A head that dense attention served because that is faster keeps the pattern and the density of its mask.
        """
        return [
            {
                "layer": layer,
                "call": call,
                "sequence": sequence,
                "batch": batch,
                "head": head,
                "pattern": _pattern(stats, batch, head),
                "distance": float(stats.js_distance[batch, head]),
                "density": float(stats.density[batch, head]),
                "coverage": float(stats.coverage[batch, head]),
                "reason": DENSE_HEAD if reason is None and stats.is_dense[batch, head] else reason,
            }
            for layer, calls in sorted(self.stats.items())
            for call, sequence, stats, reason in zip(
                self.calls.numbers[layer], self.calls.sequences[layer], calls, self.reasons[layer], strict=True
            )
            for batch in range(stats.density.shape[0])
            for head in range(stats.density.shape[1])
        ]


# the runs that the current thread or task has opened: a task begins with a copy of those of its creator, a thread with none
_OWN: ContextVar[tuple[FlexPrefillRun, ...]] = ContextVar("flexmask_own_runs", default=())


class OpenRuns:
    """The runs of open blocks, by module, in the order in which they were opened; readers take no lock."""

    def __init__(self) -> None:
        # by attention module rather than by config object, which several models may share
        self._runs: WeakKeyDictionary[nn.Module, tuple[FlexPrefillRun, ...]] = WeakKeyDictionary()

    def get(self, module: nn.Module) -> FlexPrefillRun | None:
        """The run that a call of `module` belongs to.

        The one opened last among those of the calling thread or task that are still open, else the one opened last of all.
        """
        runs = self._runs.get(module, ())
        # what is compiled for one thread serves the others
        if len(runs) > 1 and not torch.compiler.is_compiling():
            own = _OWN.get()
            for run in reversed(runs):
                if any(run is each for each in own):
                    return run
        return runs[-1] if runs else None

    def __contains__(self, module: nn.Module) -> bool:
        return module in self._runs

    def open(self, modules: Iterable[nn.Module], run: FlexPrefillRun) -> None:
        """Put `run` on top of those of `modules`, as one of the calling thread or task."""
        with LOCK:
            for module in modules:
                self._runs[module] = (*self._runs.get(module, ()), run)
        # without those that another thread closed
        _OWN.set((*(each for each in _OWN.get() if not each._is_closed), run))

    def close(self, modules: Iterable[nn.Module], run: FlexPrefillRun) -> None:
        """Take `run` away from wherever it stands among those of `modules`."""
        with LOCK:
            for module in modules:
                left = tuple(each for each in self._runs.get(module, ()) if each is not run)
                if left:
                    self._runs[module] = left
                else:
                    self._runs.pop(module, None)
        run._is_closed = True
        _OWN.set(tuple(each for each in _OWN.get() if not each._is_closed))


RUNS = OpenRuns()
HOOKS: WeakKeyDictionary[nn.Module, FlexPrefillRun] = WeakKeyDictionary()


def own_runs() -> tuple[FlexPrefillRun, ...]:
    """The runs that the calling thread or task opened and did not close."""
    return _OWN.get()


def _pattern(stats: FlexPrefillStats, batch: int, head: int) -> str:
    """A head's pattern in words; hybrid selection, which alone knows the coverage of rows, has none."""
    if stats.dense:
        return "dense"
    if not stats.row_coverage[batch, head].isnan():
        return "hybrid"
    return "query-aware" if stats.is_query_aware[batch, head] else "vertical-slash"
