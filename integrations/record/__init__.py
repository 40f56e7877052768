"""The record of one model's prefill calls: statistics and summary."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Any

from torch.nn.attention.flex_attention import BlockMask

from flexmask._torch import is_fake
from flexmask.base.checks import check_int, plain_number
from flexmask.integrations.record.calls import MAX_REASONS, LayerTotals, RecordedCall, rows_by_head
from flexmask.integrations.record.calls import CallSize as CallSize
from flexmask.integrations.record.summary import LayerSummary as LayerSummary
from flexmask.integrations.record.summary import RunSummary as RunSummary
from flexmask.integrations.record.summary import summary_of
from flexmask.settings import PrefillSettings
from flexmask.stats import SelectionStats

MAX_CALLS = 512  # per layer; a call of 32 heads takes 4.8 kB on the host and 4 kB on a GPU: 150 MB for 32 layers


@dataclass(eq=False, repr=False)
class PrefillRun:
    """The settings of one model, and what its prefill calls chose.

    Attributes
    ----------
    calls
        By layer index: each call of more than one row, in order, including dense calls, as its statistics ``stats``, the
        ``reason`` for running dense or None, the number of its ``prefill``, from 0, and its ``size``.
    masks
        As `calls`, with `collect_masks`: the mask, None for a dense call without one.
    tokens, sequences
        By layer index, of all calls, dropped ones included: tokens, and batch rows and packed sequences; several calls for one
        sequence in a prefill count once.
    settings, collect_stats, collect_masks, max_calls
        As given to `sparse_prefill`.
    """

    settings: PrefillSettings = field(default_factory=PrefillSettings)
    collect_stats: bool = True
    collect_masks: bool = False
    max_calls: int | None = MAX_CALLS
    calls: dict[int, list[RecordedCall]] = field(default_factory=dict)
    masks: dict[int, list[BlockMask | None]] = field(default_factory=dict)
    tokens: dict[int, int] = field(default_factory=dict)
    sequences: dict[int, int] = field(default_factory=dict)
    # by layer: the latest forward pass, and the last counted sequence of its pack
    _latest: dict[int, tuple[object, int]] = field(default_factory=dict)
    # layers, for the log line; the dense ones by reason
    _called: set[int] = field(default_factory=set)
    _sparse: set[int] = field(default_factory=set)
    _dense: dict[str, set[int]] = field(default_factory=dict)
    _ran: bool = False
    _dropped: dict[int, LayerTotals] = field(default_factory=dict)  # sums over dropped calls
    _lock: Any = field(default_factory=threading.RLock)  # several threads may run one model in one block

    def __post_init__(self) -> None:
        self.max_calls = plain_number(self.max_calls)
        if self.max_calls is not None:
            check_int("max_calls", self.max_calls)
            if self.max_calls < 1:
                raise ValueError(f"max_calls must be >= 1, or None for no limit; got {self.max_calls}")

    def __repr__(self) -> str:
        # a debugger must not wait for a device
        sparse = f"{len(self._sparse)} of {len(self._called)} layers sparse" if self._called else "no layer called"
        return f"<PrefillRun: {self.num_prefills} prefills, {sparse}; summary() says more>"

    @property
    def stats(self) -> dict[int, list[SelectionStats]]:
        """By layer index: the statistics of `calls`."""
        return {layer: [call.stats for call in calls] for layer, calls in self.calls.items()}

    @property
    def reasons(self) -> dict[int, list[str | None]]:
        """By layer index: why each of `calls` ran dense, or None."""
        return {layer: [call.reason for call in calls] for layer, calls in self.calls.items()}

    @property
    def num_prefills(self) -> int:
        """Number of prefills so far, of the layer with the most."""
        return max((calls[-1].prefill + 1 for calls in self.calls.values() if calls), default=0)

    @property
    def method(self) -> str:
        """The method's name, or that of its function."""
        method = self.settings.method
        return method if isinstance(method, str) else getattr(method, "__name__", type(method).__name__)

    def record(
        self,
        layer: int,
        stats: SelectionStats | None,
        mask: BlockMask | None,
        reason: str | None,
        forward_pass: object,
        size: CallSize,
    ) -> None:
        """Note a prefill call of a layer, without reading a tensor; calls with the same `forward_pass` belong to one prefill."""
        # of fake tensors only the reason is kept
        if stats is not None and is_fake(stats.density):
            stats = mask = None
        with self._lock:
            self._called.add(layer)
            if reason is None:
                self._sparse.add(layer)
            elif reason in self._dense or len(self._dense) < MAX_REASONS:
                self._dense.setdefault(reason, set()).add(layer)
            if self.collect_stats and stats is not None:
                calls = self.calls.setdefault(layer, [])
                calls.append(RecordedCall(stats, reason, self._prefill_index(layer, forward_pass, size), size))
            if self.collect_masks:
                self.masks.setdefault(layer, []).append(mask)
            if self.max_calls is not None:
                calls, masks = self.calls.get(layer, []), self.masks.get(layer, [])
                if len(calls) > self.max_calls:
                    self._dropped.setdefault(layer, LayerTotals()).add(calls[: -self.max_calls])
                del calls[: -self.max_calls], masks[: -self.max_calls]

    def _prefill_index(self, layer: int, forward_pass: object, size: CallSize) -> int:
        """The index of a call's prefill; counts its sequences and their tokens."""
        before = self.calls[layer][-1].prefill if self.calls[layer] else -1
        latest, counted = self._latest.get(layer, (None, 0))
        # packed sequences, and layers that a model calls repeatedly (DiffLlama, HRM)
        again = forward_pass is not None and before >= 0 and latest == forward_pass
        if not again or size.sequence > counted:
            self.tokens[layer] = self.tokens.get(layer, 0) + size.batch * size.q_len
            self.sequences[layer] = self.sequences.get(layer, 0) + size.batch
            counted = size.sequence
        self._latest[layer] = (forward_pass, counted)
        return before if again else before + 1

    def note_forward(self) -> None:
        """Note that the model ran a prompt."""
        self._ran = True

    @property
    def unreached(self) -> bool:
        """True if the model ran a prompt, and no layer called the attention."""
        return self._ran and not self._called

    @property
    def ignored(self) -> list[int]:
        """Layers with own options that called no attention though others did, as the state-space layers of hybrid models."""
        return sorted({*self.settings.layers} - self._called) if self._called else []

    def dense_summary(self) -> tuple[bool, str] | None:
        """Summarize the dense calls: True if every call ran dense, and the log line; None if no call did."""
        if not self._dense:
            return None
        dense = set().union(*self._dense.values())
        layers = f"all {len(dense)} layers" if dense == self._called else f"{len(dense)} of {len(self._called)} layers"
        at_times = ", in some calls" if dense & self._sparse else ""
        reasons = sorted(self._dense, key=lambda reason: -len(self._dense[reason]))
        more = "; and more" if len(reasons) > 3 else ""
        return not self._sparse, f"{layers} ran dense{at_times}: {'; '.join(reasons[:3])}{more}"

    def rows(self) -> list[dict[str, Any]]:
        """One row per layer, kept prefill call, packed sequence, batch row and head.

        Each has as `call` the number of its prefill, from 0, which packed sequences and repeated calls of a layer share. It also
        has its pattern, the statistics of `flexmask.SelectionStats` by name, q_len and seq_len (tokens so far), and the `reason`
        if the call ran dense. A head that ran dense because that is faster has the pattern and the density of its mask.
        """
        return rows_by_head(self._state()[0], self.method)

    def summary(self) -> RunSummary:
        """Summarise what ran sparse, what dense and why, densities, patterns and tokens, of all calls so far.

        Counts nothing without `collect_stats`. ``print(run.summary())`` shows a line per layer.
        """
        with self._lock:
            kept, dropped = self._state()
            sequences, tokens = (max(counted.values(), default=0) for counted in (self.sequences, self.tokens))
            prefills = self.num_prefills
        # without the lock, because this waits for a device while other calls go on
        totals = {layer: dropped.get(layer, LayerTotals()).with_calls(calls) for layer, calls in kept.items()}
        return summary_of(totals, self.method, prefills, sequences, tokens, sum(total.calls for total in dropped.values()))

    def reset(self) -> None:
        """Forget all calls so far; settings stay."""
        with self._lock:
            for kept in (self.calls, self.masks, self.tokens, self.sequences, self._latest, self._dropped):
                kept.clear()
            for layers in (self._called, self._sparse, self._dense):
                layers.clear()
            self._ran = False

    def _state(self) -> tuple[dict[int, list[RecordedCall]], dict[int, LayerTotals]]:
        """Snapshots of kept calls, and of sums over dropped ones."""
        with self._lock:
            kept = {layer: list(calls) for layer, calls in self.calls.items()}
            return kept, {layer: total.with_calls(()) for layer, total in self._dropped.items()}
