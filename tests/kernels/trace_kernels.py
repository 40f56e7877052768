"""Trace the kernels' search with torch.compile for a pretended GPU: a program of its own, without Triton's interpreter.

Variants share their names, so that torch makes every number symbolic that differs between them, as it does in a process that
serves several models.
"""

import itertools
import sys
import types
from typing import Any

import torch
import torch.utils._triton
import triton
from triton.backends.compiler import GPUTarget

from flexmask._torch import with_dynamic
from flexmask.base.inputs import AttentionInputs
from flexmask.config import FlexPrefillConfig, compile_time
from flexmask.kernels.search import search


class Driver:
    """As much of a GPU's driver as tracing asks for."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


class TracedError(Exception):
    """Raised in place of running the graph."""


def backend(graph: Any, inputs: Any) -> Any:
    def run(*arguments: Any) -> None:
        raise TracedError

    return run


VARIANTS = (
    (64, torch.float32, 64, None, None, 0.1),
    (128, torch.bfloat16, 128, None, None, 0.2),
    (32, torch.bfloat16, 64, 3.0, 40, 0.3),
    (256, torch.bfloat16, 256, 4.0, 50, 0.4),
    (128, torch.float32, 192, None, None, 0.1),
)


def main(count: int) -> None:
    """Trace the first `count` variants, with statistics and without."""
    torch.utils._triton.has_triton = lambda: True  # type: ignore[assignment]  # a cached function
    triton.runtime.driver.set_active(Driver())
    half = torch.tensor(0.5, dtype=torch.float64)
    for block_size, dtype, head_dim, softcap, window, scale in VARIANTS[:count]:
        own = types.FunctionType(search.__code__.replace(), search.__globals__, search.__name__)
        run = torch.compile(own, fullgraph=True, backend=backend)
        query, key = (torch.zeros(1, heads, 300, head_dim, dtype=dtype) for heads in (4, 2))
        inputs = AttentionInputs(with_dynamic(query, 2), with_dynamic(key, 2), None, scale, softcap, window)
        for selection, with_stats in itertools.product(("coverage", "hybrid"), (False, True)):
            options: dict[str, Any] = {"selection": selection, "row_stride": 16 if softcap else 8}
            config = compile_time(FlexPrefillConfig(0.5, 0.5, block_size=block_size, min_budget=block_size, **options))
            try:
                run(inputs, config, half, half, with_stats, True)
            except TracedError:
                print("traced", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]))
