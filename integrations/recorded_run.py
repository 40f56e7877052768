"""The record of one model's prefill calls."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from flexmask.base.checks import check_int
from flexmask.integrations.prefill_calls import CallSize, PrefillCalls
from flexmask.integrations.run_calls import RecordedCall, rows_of
from flexmask.integrations.run_files import SavedRun, load_run, save_run
from flexmask.integrations.run_pictures import plot_rows
from flexmask.integrations.run_summary import RunSummary, summary_of
from flexmask.integrations.run_totals import MOST_REASONS, LayerTotals
from flexmask.integrations.settings import PrefillSettings
from flexmask.stats import FlexPrefillStats

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# several threads may run one model in one block; also held while blocks open and close
LOCK = threading.RLock()
# Of each layer. A call of 32 heads takes 4.8 kB on the host and, on a GPU, 4 kB there (512 B, the allocator's least, for each
# tensor): 150 MB in all for 32 layers
MAX_CALLS = 512


@dataclass(eq=False, repr=False)
class FlexPrefillRun:
    """The settings of one model, and what its prefill calls chose.

    The latest `max_calls` calls of each layer are kept; the summary counts those before them too.

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
    max_calls
        Prefill calls of each layer that are kept at most, the latest; None: all.
    probe
        A function that serves every prefill call instead of `route`, or None: `tune` measures by it.
    padding_is_masked
        True if the caller masks all padding, so that equal tokens at a prompt's end are the prompt's own.
    """

    settings: PrefillSettings = field(default_factory=PrefillSettings)
    collect_stats: bool = True
    collect_masks: bool = False
    max_calls: int | None = MAX_CALLS
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
    # of the calls that are no longer kept
    _dropped: dict[int, LayerTotals] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        check_max_calls(self.max_calls)

    def __repr__(self) -> str:
        # from what the host knows, so that a debugger does not wait for a device
        sparse = f"{len(self._sparse)} of {len(self._called)} layers sparse" if self._called else "no layer called"
        return f"<FlexPrefillRun: {self.calls.prefills} prefills, {sparse}; summary() says more>"

    def record(
        self,
        layer: int,
        stats: FlexPrefillStats | None,
        mask: BlockMask | None,
        reason: str | None = None,
        prefill: int | None = None,
        size: CallSize = CallSize(),  # noqa: B008  # immutable
    ) -> None:
        """Note one prefill call of one layer: its statistics and its mask, if kept, and why it ran dense, if it did.

        `prefill` is the number of its `PrefillMask`; the sizes are its own. Reads no value of a tensor.
        """
        # in a compiled forward a lock would break the graph
        with nullcontext() if torch.compiler.is_compiling() else LOCK:
            self._count(layer, reason)
            if self.collect_stats and stats is not None:
                self.stats.setdefault(layer, []).append(stats)
                self.reasons.setdefault(layer, []).append(reason)
                self.calls.begin(layer, prefill, size)
            if self.collect_masks:
                self.masks.setdefault(layer, []).append(mask)
            if self.max_calls is not None:
                self._drop(layer, self.max_calls)

    def _count(self, layer: int, reason: str | None) -> None:
        self._called.add(layer)
        if reason is None:
            self._sparse.add(layer)
        elif reason in self._dense or len(self._dense) < MOST_REASONS:
            self._dense.setdefault(reason, set()).add(layer)

    def note_forward(self) -> None:
        """Note that a forward of more than one token came to its end."""
        self._ran = True

    @property
    def unreached(self) -> bool:
        """True if the model ran, but none of its layers came here."""
        return self._ran and not self._called

    def dense_summary(self) -> tuple[bool, str] | None:
        """Return True if every call ran dense, and a line with the dense layers and their reasons; None if none ran dense."""
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
        """Return one row a layer, kept prefill call, packed sequence, batch row and head.

        Each has its pattern, distance, density and coverages, the call's q_len and kv_len, and the `reason` if it ran dense. A
        head that dense attention served because that is faster keeps the pattern and the density of its mask.
        """
        return rows_of(self._state()[0])

    def summary(self) -> RunSummary:
        """Return what ran sparse, what dense and why, densities, patterns and tokens, of all calls so far.

        Without `collect_stats` nothing is counted. ``print(run.summary())`` shows a line a layer.
        """
        with LOCK:
            kept, dropped = self._state()
            tokens, prefills = max(self.calls.tokens.values(), default=0), self.calls.prefills
        # without the lock: it waits for a device, and calls go on meanwhile
        totals = {layer: dropped.get(layer, LayerTotals()).with_calls(calls) for layer, calls in kept.items()}
        return summary_of(totals, prefills, tokens, sum(each.calls for each in dropped.values()))

    def to_pandas(self) -> Any:
        """Return `rows` as a pandas.DataFrame.

        Raises
        ------
        ImportError
            If pandas is missing.
        """
        try:
            import pandas
        except ImportError as error:
            raise ImportError("to_pandas needs pandas: pip install pandas; rows() gives the same as a list of dicts") from error
        return pandas.DataFrame(self.rows())

    def save(self, path: str | Path) -> Path:
        """Write settings and statistics as JSON, for `load`; masks are left out. Returns the path.

        Raises
        ------
        ValueError
            For a `method` that is a function: only names can be saved.
        """
        path = Path(path)
        with LOCK:
            saved = SavedRun(self.settings, *self._state(), dict(self.calls.tokens))
        save_run(path, saved)
        return path

    @classmethod
    def load(cls, path: str | Path) -> FlexPrefillRun:
        """Read a run that `save` wrote, its statistics on the CPU, and without a cap on calls.

        Raises
        ------
        ValueError
            For another file.
        """
        saved = load_run(Path(path))
        run = cls(saved.settings, max_calls=None)
        for layer, calls in saved.calls.items():
            for call in calls:
                size = CallSize(call.stats.density.shape[0], call.q_len, call.kv_len, call.sequence)
                run.record(layer, call.stats, None, call.reason, call.prefill, size)
            run.calls.numbers[layer] = [call.prefill for call in calls]
        run.calls.tokens.update(saved.tokens)
        run._dropped.update(saved.dropped)
        return run

    def plot(self) -> list[Axes]:
        """Draw density, pattern share and, where heads have one, Jensen-Shannon distance, side by side. Returns their Axes.

        Raises
        ------
        ValueError
            For a run without statistics.
        ImportError
            If matplotlib is missing.
        """
        return plot_rows(self.rows(), self.settings.config.tau)

    def reset(self) -> None:
        """Forget all calls so far; settings stay, and calls to come are recorded as before."""
        with LOCK:
            for kept in (self.stats, self.masks, self.reasons, self._called, self._sparse, self._dense, self._dropped):
                kept.clear()
            self.calls.reset()
            self._ran = False

    def _state(self) -> tuple[dict[int, list[RecordedCall]], dict[int, LayerTotals]]:
        """The calls that are kept and the sums over the others, both as they are now; calls to come do not change them."""
        with LOCK:
            return self._kept(), {layer: each.with_calls(()) for layer, each in self._dropped.items()}

    def _kept(self) -> dict[int, list[RecordedCall]]:
        return {
            layer: [
                RecordedCall(stats, reason, number, *size[1:])
                for stats, reason, number, size in zip(
                    each, self.reasons[layer], self.calls.numbers[layer], self.calls.sizes[layer], strict=True
                )
            ]
            for layer, each in self.stats.items()
        }

    def _drop(self, layer: int, most: int) -> None:
        """Let go of the oldest calls beyond `most`, and count them."""
        masks = self.masks.get(layer, [])
        if len(masks) > most:
            del masks[: len(masks) - most]
        stats = self.stats.get(layer, [])
        beyond = len(stats) - most
        if beyond > 0:
            parts = (stats, self.reasons[layer], self.calls.numbers[layer], self.calls.sizes[layer])
            gone = [RecordedCall(*each[:3], *each[3][1:]) for each in zip(*(part[:beyond] for part in parts), strict=True)]
            self._dropped.setdefault(layer, LayerTotals()).add(gone)
            for part in parts:
                del part[:beyond]


def check_max_calls(max_calls: int | None) -> None:
    """Raise unless `max_calls` is None or an int > 0."""
    if max_calls is not None:
        check_int("max_calls", max_calls)
        if max_calls < 1:
            raise ValueError(f"max_calls must be >= 1, or None for no limit; got {max_calls}")
