"""The state of one model in one process of an engine, which the plug-ins of all engines share."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor

from flexmask.dense_policy import DensePolicy
from flexmask.integrations.serving.chunk import SparseRequest, attend_chunk
from flexmask.integrations.serving.counters import Counters
from flexmask.integrations.serving.layers import Role, SparseLayer, Stock
from flexmask.integrations.serving.options import ServingOptions
from flexmask.integrations.serving.split import StepRequests, StepSplit, split_step
from flexmask.integrations.serving.startup import reserve, roles_line, warm_up

StockBase: Any = object  # the mixins' base for mypy, which runs without the engines


class Engine:
    """The options, counters and roles of a model's attention layers.

    A subclass fills `roles` (`role_of_shape`). It calls `start` before the first request, `reserve` while memory is measured,
    `split` in each step, `count_step` in each layer that may run sparse, and `attend` for each sparse request. It gives the other
    rows to the engine's own kernel.
    """

    def __init__(self, options: ServingOptions, log: logging.Logger) -> None:
        self.options = options
        self.counters = Counters()
        self.roles: dict[Any, Role] = {}
        """By layer, in the model's order"""
        self._log = log

    @property
    def sparse_layers(self) -> list[SparseLayer]:
        return [role for role in self.roles.values() if isinstance(role, SparseLayer)]

    def start(
        self, largest: tuple[int, int], device: torch.device, dtype: torch.dtype, kernel: str,
        policy: DensePolicy | None = None, is_first: bool = True, exports: bool = False,
    ) -> None:  # fmt: skip
        """Log the roles and compile, in the grad mode in which requests run.

        `largest` is the last chunk of the longest prompt, as its rows and the tokens so far; `kernel` is the engine's name of
        its own kernel; with `is_first` this rank logs, and with `exports` it also exports its counters.
        """
        policy = policy or self.options.policy
        reason = policy.size_reason(*largest)
        if reason is not None:
            stock = Stock(f"the largest call: {reason}")
            self.roles = {name: stock if isinstance(role, SparseLayer) else role for name, role in self.roles.items()}
        if is_first:
            self._log.info("%s", roles_line(self.roles.values(), self.options, kernel, policy.min_rows))
        if not self.sparse_layers:
            return
        seconds = warm_up(self.sparse_layers, largest, device, dtype, self.options.count_density)
        if is_first:
            self._log.info("flexmask: kernels compiled in %.1f s", seconds)
            self.counters.log_to(self._log, self.options.log_every)
            # only by the first stage of pipeline parallelism: every stage sees every token, and metrics add up over processes
            if exports:
                self.counters.export()

    def reserve(self, largest: tuple[int, int], device: torch.device, dtype: torch.dtype) -> None:
        """Make the largest call on CUDA, while the engine measures memory."""
        if self.sparse_layers:
            reserve(self.sparse_layers, largest, device, dtype, self.options.count_density)

    def split(self, requests: StepRequests, reason: str | None = None, policy: DensePolicy | None = None) -> StepSplit:
        """Split a step (`split_step`); for a `reason`, which is logged once, all rows run stock."""
        if reason is not None:
            self.counters.warn_once(reason)
            requests = requests._replace(seq_lens=None)
        return split_step(requests, policy or self.options.policy)

    def count_step(self, role: SparseLayer, split: StepSplit, reason: str | None = None) -> None:
        """Count a step's tokens, in its first sparse layer: as split, or all as dense for a `reason`, which is logged once."""
        if reason is not None:
            self.counters.warn_once(reason)
        if role is next((other for other in self.roles.values() if isinstance(other, SparseLayer)), None):
            sparse = split.sparse_tokens if reason is None else 0
            self.counters.add_step(sparse, split.sparse_tokens + split.dense_tokens - sparse)

    def attend(
        self, role: SparseLayer, request: SparseRequest, query: Tensor, key: Tensor, value: Tensor,
        sinks: Tensor | None = None, is_counted: bool = True, out: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Attention of a request's chunk, in `out` if any; shapes as in `attend_chunk`, keys and values from `concat_cached`."""
        with_counts, requested = self.options.count_density, role.with_gamma(request.gamma)
        statistics = self.counters.statistics if with_counts else ()
        attended = attend_chunk(requested, query, key, value, sinks, request, statistics, with_counts=with_counts, out=out)
        if with_counts and is_counted:
            self.counters.add_call(role, attended, query.shape[0], key.shape[1], names_heads=request.gamma is None)
        if out is None:
            return attended.out
        if attended.out.data_ptr() != out.data_ptr():
            out.copy_(attended.out)
        return out
