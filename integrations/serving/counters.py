"""Counts sparse and dense prefill tokens, the density, and heads that keep little, of an engine process."""

from __future__ import annotations

import functools
import logging
import threading
import time
from typing import Any

from torch import Tensor

from flexmask.integrations.record.calls import CallSize, LayerTotals, RecordedCall
from flexmask.integrations.record.summary import summary_of
from flexmask.stats import SelectionStats

IN_EVERY_STEP = ("density",)
IN_SOME_STEPS = (*IN_EVERY_STEP, "coverage", "least_row_coverage")  # statistics of the first sparse step after each log


class Counters:
    """Counts of one engine in this process. Only the report reads statistics from the device."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.steps = 0
        self.sparse_tokens = 0
        self.dense_tokens = 0
        self._density: Tensor | None = None
        self._density_pairs = 0
        self._metric: Any = None
        self._logger: logging.Logger | None = None
        self._log_every = 0.0
        self._logged = time.monotonic()
        self._warned: set[str] = set()
        self._heads: dict[int, LayerTotals] = {}  # by layer, of the steps in which heads are looked at
        self._looks_next, self._looks = True, False

    def reset(self) -> None:
        """Count from zero; the exported metric goes on."""
        with self._lock:
            self.steps = self.sparse_tokens = self.dense_tokens = self._density_pairs = 0
            self._density = None

    def add_step(self, sparse: int, dense: int) -> None:
        """Count a step's prefill tokens; call it once per step."""
        with self._lock:
            self.steps += bool(sparse)
            if sparse:
                self._looks, self._looks_next = self._looks_next, False
            self.sparse_tokens += sparse
            self.dense_tokens += dense
            if self._metric is not None:
                self._metric.labels("sparse").inc(sparse)
                self._metric.labels("dense").inc(dense)
        if sparse + dense > 0 and time.monotonic() - self._logged >= self._log_every:
            self.log()

    @property
    def statistics(self) -> tuple[str, ...]:
        """Of the calls of this step."""
        return IN_SOME_STEPS if self._looks else IN_EVERY_STEP

    def add_call(self, layer: int, stats: SelectionStats, rows: int, tokens: int, heads: bool = True) -> None:
        """Add the density of a call's last `rows` of `tokens`, by its pairs, without waiting; `heads`: those low are named."""
        pairs = CallSize(1, rows, tokens).pairs
        with self._lock:
            weighted = stats.density.mean().double() * pairs
            self._density = weighted if self._density is None else self._density + weighted
            self._density_pairs += pairs
            if heads and self._looks:
                self._heads.setdefault(layer, LayerTotals()).add([RecordedCall(stats, None, 0, CallSize())])

    @property
    def density(self) -> float | None:
        """Kept share over all sparse calls. Waits for the device."""
        return None if self._density is None else self._density.item() / self._density_pairs

    def report(self) -> str:
        density = self.density
        mean = "none" if density is None else f"{density:.1%}"
        tokens = f"{self.sparse_tokens} prefill tokens sparse in {self.steps} steps, {self.dense_tokens} dense"
        return f"flexmask served {tokens}; mean density {mean}"

    def log_to(self, logger: logging.Logger, seconds: float) -> None:
        """Log the report at most this often, in steps that prefill."""
        self._logger, self._log_every = logger, seconds

    def log(self) -> None:
        """Log the report now if `log_to` was called; the first time that heads keep little also these."""
        if self._logger is None:
            return
        self._logged, self._looks_next = time.monotonic(), True
        self._logger.info("%s", self.report())
        low = self.low_heads()
        if low is not None:
            self._warn_once("heads", f"flexmask: {low}")

    def low_heads(self) -> str | None:
        """The heads that keep little, as in the summary of a run; None without any. Waits for the device."""
        return summary_of(self._heads, "", 0, 0, 0, 0).warning

    def warn_once(self, reason: str) -> None:
        """Log why prompts that may run sparse run stock, once per reason."""
        self._warn_once(reason, f"flexmask: attention runs stock: {reason}")

    def _warn_once(self, kind: str, line: str) -> None:
        if self._logger is not None and kind not in self._warned:
            self._warned.add(kind)
            self._logger.warning("%s", line)

    def export(self) -> None:
        """Also count into prometheus_client's registry, as ``flexmask:prefill_tokens_total``.

        A server's ``/metrics`` shows it if the engine runs in the server's process or PROMETHEUS_MULTIPROC_DIR is set.
        """
        self._metric = _metric()
        for attention in ("sparse", "dense"):
            self._metric.labels(attention)


@functools.cache
def _metric() -> Any:
    from prometheus_client import Counter

    return Counter("flexmask:prefill_tokens", "Prefill tokens, by how attention ran", ["attention"])
