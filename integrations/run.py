"""The runs that are open on each module of a model."""

from __future__ import annotations

from collections.abc import Iterable
from contextvars import ContextVar
from weakref import WeakKeyDictionary

import torch
from torch import nn

from flexmask.integrations.recorded_run import LOCK as LOCK
from flexmask.integrations.recorded_run import MAX_CALLS as MAX_CALLS
from flexmask.integrations.recorded_run import FlexPrefillRun as FlexPrefillRun
from flexmask.integrations.recorded_run import check_max_calls as check_max_calls

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
