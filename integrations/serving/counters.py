"""Counts an engine process's sparse and dense prefill tokens, its density, and the heads that keep little."""

from __future__ import annotations

import functools
import logging
import threading
import time
from typing import Any

import torch
from torch import Tensor

from flexmask.attend import AttentionResult
from flexmask.base.visibility import num_visible_blocks
from flexmask.integrations.record.calls import CallSize, LayerTotals, RecordedCall
from flexmask.integrations.record.summary import summary_of
from flexmask.integrations.serving.layers import SparseLayer

# computed in the first sparse step, and in the first after each log until a warning names heads that keep little
SAMPLED_STATISTICS = ("density", "coverage", "min_row_coverage")
_MAX_COUNTS = 64  # tensors of kept blocks that are collected before they are summed


class Counters:
    """Counts of one engine in this process. Only the report reads statistics from the device."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.sparse_steps = 0
        self.sparse_tokens = 0
        self.dense_tokens = 0
        self._kept_pairs: float | Tensor = 0.0  # by sparse calls; a float until lists are counted
        self._pairs = 0
        self._counts: dict[float, list[Tensor]] = {}  # not yet summed, by the number of pairs that a kept block counts for
        self._metric: Any = None
        self._logger: logging.Logger | None = None
        self._log_every = 0.0
        self._logged = time.monotonic()
        self._warned: set[str] = set()
        self._heads: dict[int, LayerTotals] = {}  # by layer, of the steps that sample heads
        self._samples_heads_next, self._samples_heads = True, False

    def reset(self) -> None:
        """Set the counts to zero, except those of the exported metric."""
        with self._lock:
            self.sparse_steps = self.sparse_tokens = self.dense_tokens = self._pairs = 0
            self._kept_pairs, self._counts, self._heads = 0.0, {}, {}

    def add_step(self, sparse: int, dense: int) -> None:
        """Count a step's prefill tokens; call it once per step."""
        with self._lock:
            self.sparse_steps += bool(sparse)
            if sparse:
                self._samples_heads, self._samples_heads_next = self._samples_heads_next, False
            self.sparse_tokens += sparse
            self.dense_tokens += dense
            if self._metric is not None:
                self._metric.labels("sparse").inc(sparse)
                self._metric.labels("dense").inc(dense)
        if sparse + dense > 0 and time.monotonic() - self._logged >= self._log_every:
            self.log()

    @property
    def statistics(self) -> tuple[str, ...]:
        """The statistics that this step's calls compute."""
        return SAMPLED_STATISTICS if self._samples_heads else ()

    def add_call(self, role: SparseLayer, attended: AttentionResult, rows: int, seq_len: int, names_heads: bool = True) -> None:
        """Add the density of a call whose `rows` rows end at `seq_len` tokens; with `names_heads` the log may name its heads."""
        # calls are weighted by their pairs, and nothing here waits for the device
        pairs, counts = CallSize(1, rows, seq_len).pairs, attended.counts
        with self._lock:
            self._pairs += pairs
            if counts:
                visible = num_visible_blocks(rows, seq_len, role.method.block_size, role.window)
                lists = sum(group_counts.shape[1] for group_counts in counts) // 2
                self._counts.setdefault(pairs / (visible * lists), []).extend(counts)
            else:
                self._kept_pairs = self._kept_pairs + pairs
            if sum(map(len, self._counts.values())) >= _MAX_COUNTS:
                self._add_counts()
            if names_heads and self._samples_heads and attended.stats is not None:
                self._heads.setdefault(role.layer_index, LayerTotals()).add([RecordedCall(attended.stats, None, 0, CallSize())])

    def _add_counts(self) -> None:
        # one sum over all layers: a launch per layer would take longer
        for pairs, counts in self._counts.items():
            self._kept_pairs = self._kept_pairs + torch.cat([count.flatten() for count in counts]).sum().double() * pairs
        self._counts = {}

    @property
    def density(self) -> float | None:
        """Kept share of the pairs of all sparse calls, None before the first. Waits for the device."""
        with self._lock:
            self._add_counts()
            kept, pairs = self._kept_pairs, self._pairs
        return float(kept) / pairs if pairs else None

    def report(self) -> str:
        """The line for the log. Waits for the device."""
        density = self.density
        mean = "none" if density is None else f"{density:.1%}"
        tokens = f"{self.sparse_tokens} prefill tokens sparse in {self.sparse_steps} steps, {self.dense_tokens} dense"
        return f"flexmask served {tokens}; mean density {mean}"

    def log_to(self, logger: logging.Logger, seconds: float) -> None:
        """Log the report at most this often, in steps that prefill."""
        self._logger, self._log_every = logger, seconds

    def log(self) -> None:
        """Log the report now if `log_to` was called; also log heads that keep little, once."""
        if self._logger is None:
            return
        self._logged = time.monotonic()
        self._logger.info("%s", self.report())
        low = None if "heads" in self._warned else self.low_heads()
        if low is not None:
            self._warn_once("heads", f"flexmask: {low}")
        self._samples_heads_next = "heads" not in self._warned

    def low_heads(self) -> str | None:
        """The warning of `RunSummary` about heads that keep little, or None. Waits for the device."""
        with self._lock:
            return summary_of(self._heads, "", 0, 0, 0, 0).warning

    def warn_once(self, reason: str) -> None:
        """Log once per reason why prompts that could run sparse run stock."""
        self._warn_once(reason, f"flexmask: the engine's own attention runs: {reason}")

    def _warn_once(self, kind: str, line: str) -> None:
        if self._logger is not None and kind not in self._warned:
            self._warned.add(kind)
            self._logger.warning("%s", line)

    def export(self) -> None:
        """Also count into prometheus_client's registry, as ``flexmask:prefill_tokens_total``."""
        # /metrics shows it if the engine runs in the server's process, or if PROMETHEUS_MULTIPROC_DIR is set
        self._metric = _metric()
        for attention in ("sparse", "dense"):
            self._metric.labels(attention)


@functools.cache
def _metric() -> Any:
    from prometheus_client import Counter

    return Counter("flexmask:prefill_tokens", "Prefill tokens, by how attention ran", ["attention"])
