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
    _latest_passes: dict[int, tuple[object, int]] = field(default_factory=dict)
    # layers for the log line: all that were called, those that ran sparse, and by reason those that ran dense
    _called_layers: set[int] = field(default_factory=set)
    _sparse_layers: set[int] = field(default_factory=set)
    _dense_layers: dict[str, set[int]] = field(default_factory=dict)
    _has_run: bool = False
    _dropped_totals: dict[int, LayerTotals] = field(default_factory=dict)  # sums over dropped calls
    _lock: Any = field(default_factory=threading.RLock)  # several threads may run one model in one block

    def __post_init__(self) -> None:
        self.max_calls = plain_number(self.max_calls)
        if self.max_calls is not None:
            check_int("max_calls", self.max_calls)
            if self.max_calls < 1:
                raise ValueError(f"max_calls must be >= 1, or None for no limit; got {self.max_calls}")

    def __repr__(self) -> str:
        # a debugger must not wait for a device
        sparse = (
            f"{len(self._sparse_layers)} of {len(self._called_layers)} layers sparse"
            if self._called_layers
            else "no layer called"
        )
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
        """Record a layer's prefill call without reading a tensor; calls with the same `forward_pass` belong to one prefill."""
        # of a call on fake tensors only the reason is recorded
        if stats is not None and is_fake(stats.density):
            stats = mask = None
        with self._lock:
            self._called_layers.add(layer)
            if reason is None:
                self._sparse_layers.add(layer)
            elif reason in self._dense_layers or len(self._dense_layers) < MAX_REASONS:
                self._dense_layers.setdefault(reason, set()).add(layer)
            if self.collect_stats and stats is not None:
                calls = self.calls.setdefault(layer, [])
                calls.append(RecordedCall(stats, reason, self._prefill_index(layer, forward_pass, size), size))
            if self.collect_masks:
                self.masks.setdefault(layer, []).append(mask)
            if self.max_calls is not None:
                calls, masks = self.calls.get(layer, []), self.masks.get(layer, [])
                if len(calls) > self.max_calls:
                    self._dropped_totals.setdefault(layer, LayerTotals()).add(calls[: -self.max_calls])
                del calls[: -self.max_calls], masks[: -self.max_calls]

    def _prefill_index(self, layer: int, forward_pass: object, size: CallSize) -> int:
        """The index of a call's prefill; counts its sequences and their tokens."""
        last_prefill = self.calls[layer][-1].prefill if self.calls[layer] else -1
        latest_pass, last_sequence = self._latest_passes.get(layer, (None, 0))
        # true for packed sequences, and for layers that a model calls repeatedly (DiffLlama, HRM)
        is_same_prefill = forward_pass is not None and last_prefill >= 0 and latest_pass == forward_pass
        if not is_same_prefill or size.sequence > last_sequence:
            self.tokens[layer] = self.tokens.get(layer, 0) + size.batch * size.q_len
            self.sequences[layer] = self.sequences.get(layer, 0) + size.batch
            last_sequence = size.sequence
        self._latest_passes[layer] = (forward_pass, last_sequence)
        return last_prefill if is_same_prefill else last_prefill + 1

    def note_forward(self) -> None:
        """Note that the model ran a prompt."""
        self._has_run = True

    @property
    def unreached(self) -> bool:
        """True if the model ran a prompt, and no layer called the attention."""
        return self._has_run and not self._called_layers

    @property
    def ignored(self) -> list[int]:
        """Layers with own options that called no attention though other layers did: the state-space layers of hybrid models."""
        return sorted({*self.settings.layers} - self._called_layers) if self._called_layers else []

    def dense_summary(self) -> tuple[bool, str] | None:
        """Summarize the dense calls: True if every call ran dense, and the log line; None if no call did."""
        if not self._dense_layers:
            return None
        dense_layers = set().union(*self._dense_layers.values())
        num_dense, num_called = len(dense_layers), len(self._called_layers)
        layers = f"all {num_dense} layers" if dense_layers == self._called_layers else f"{num_dense} of {num_called} layers"
        in_some_calls = ", in some calls" if dense_layers & self._sparse_layers else ""
        reasons = sorted(self._dense_layers, key=lambda reason: -len(self._dense_layers[reason]))
        ending = "; and more" if len(reasons) > 3 else ""
        return not self._sparse_layers, f"{layers} ran dense{in_some_calls}: {'; '.join(reasons[:3])}{ending}"

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
            calls_by_layer, dropped_totals = self._state()
            sequences, tokens = (max(by_layer.values(), default=0) for by_layer in (self.sequences, self.tokens))
            prefills = self.num_prefills
        # after the lock is released, since this waits for a device while other calls go on
        totals = {layer: dropped_totals.get(layer, LayerTotals()).with_calls(calls) for layer, calls in calls_by_layer.items()}
        dropped_calls = sum(total.calls for total in dropped_totals.values())
        return summary_of(totals, self.method, prefills, sequences, tokens, dropped_calls)

    def reset(self) -> None:
        """Forget all calls so far; settings stay."""
        with self._lock:
            for by_layer in (self.calls, self.masks, self.tokens, self.sequences, self._latest_passes, self._dropped_totals):
                by_layer.clear()
            for layers in (self._called_layers, self._sparse_layers, self._dense_layers):
                layers.clear()
            self._has_run = False

    def _state(self) -> tuple[dict[int, list[RecordedCall]], dict[int, LayerTotals]]:
        """Snapshots of kept calls, and of sums over dropped ones."""
        with self._lock:
            calls_by_layer = {layer: list(calls) for layer, calls in self.calls.items()}
            return calls_by_layer, {layer: total.with_calls(()) for layer, total in self._dropped_totals.items()}
