"""Peak device memory of one call."""

from __future__ import annotations

import torch

from bench.measure.clock import Method, free, synchronize


def peak_bytes(method: Method) -> tuple[int, int]:
    """Return the peak of device memory during a call, beyond what was allocated before, and how much of it the result holds.

    The method must be compiled and warm.
    """
    free()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    result = method()
    synchronize()
    peak, after = torch.cuda.max_memory_allocated() - before, torch.cuda.memory_allocated() - before
    del result
    return peak, after
