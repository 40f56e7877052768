"""Counts sparse and dense prefill tokens and the density of an engine process."""

from __future__ import annotations

import functools
import logging
import threading
import time
from typing import Any

from torch import Tensor


class Counters:
    """Counts of one engine in this process. Only the report reads densities from the device."""

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

    def reset(self) -> None:
        """Count from zero; the exported metric goes on."""
        with self._lock:
            self.steps = self.sparse_tokens = self.dense_tokens = self._density_pairs = 0
            self._density = None

    def add_step(self, sparse: int, dense: int) -> None:
        """Count a step's prefill tokens; call it once per step."""
        with self._lock:
            self.steps += bool(sparse)
            self.sparse_tokens += sparse
            self.dense_tokens += dense
            if self._metric is not None:
                self._metric.labels("sparse").inc(sparse)
                self._metric.labels("dense").inc(dense)
        if self._logger is not None and sparse + dense > 0 and time.monotonic() - self._logged >= self._log_every:
            self._logged = time.monotonic()
            self.log()

    def add_density(self, density: Tensor, rows: int, tokens: int) -> None:
        """Add the density of a call's last `rows` of `tokens`, weighted by their query-key pairs, without waiting."""
        pairs = rows * (2 * tokens - rows + 1) // 2
        with self._lock:
            weighted = density.detach().double() * pairs
            self._density = weighted if self._density is None else self._density + weighted
            self._density_pairs += pairs

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
        """Log the report now if `log_to` was called."""
        if self._logger is not None:
            self._logger.info("%s", self.report())

    def warn_once(self, reason: str) -> None:
        """Log why prompts that may run sparse run stock, once per reason."""
        if self._logger is not None and reason not in self._warned:
            self._warned.add(reason)
            self._logger.warning("flexmask: attention runs stock: %s", reason)

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
