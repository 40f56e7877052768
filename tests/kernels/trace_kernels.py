"""Trace the kernels' search with torch.compile for a pretended GPU, without Triton's interpreter.

Variants share their names, so torch makes every number symbolic that differs between them.
"""

import itertools
import sys
import types
from typing import Any

import torch
import torch.utils._triton
import triton
from triton.backends.compiler import GPUTarget

from flexmask._torch import options_for_launches, with_dynamic
from flexmask.base.inputs import AttentionInputs
from flexmask.run_method import _chosen
from flexmask.stats import STATISTICS
from tests.cases import Config


class Driver:
    """The part of a GPU's driver that tracing needs."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


class TracedError(Exception):
    """Raised in place of running the graph."""


def backend(graph: Any, inputs: Any, **_: Any) -> Any:
    def run(*arguments: Any) -> None:
        raise TracedError

    return run


def without_globals(entries: Any) -> list[bool]:
    """As `options_for_launches` filters guards; raises if one that goes is on a tensor or container of a module."""
    stays = [bool(stay) for stay in torch.compiler.skip_guard_on_globals_unsafe(entries)]
    for entry in itertools.compress(entries, (not stay for stay in stays)):
        # dicts are constants, which have capitals, and namespaces of named tuples
        may_change = isinstance(entry.value, dict) and not (entry.name.split(".")[-1].isupper() or "unnamed_scope" in entry.name)
        if may_change or isinstance(entry.value, (torch.Tensor, list, set)):
            raise AssertionError(f"{entry.name} is not watched")
    return stays


VARIANTS = (
    (64, torch.float32, 64, None, None, 0.1),
    (128, torch.bfloat16, 128, None, None, 0.2),
    (32, torch.bfloat16, 64, 3.0, 40, 0.3),
    (256, torch.bfloat16, 256, 4.0, 50, 0.4),
    (128, torch.float32, 192, None, None, 0.1),
)


def main(count: int) -> None:
    """Trace the first `count` variants, with statistics and without."""
    torch.utils._triton.has_triton = lambda *_, **__: True  # type: ignore[assignment]  # a cached function
    triton.runtime.driver.set_active(Driver())
    numbers = {"gamma": torch.full((4,), 0.5, dtype=torch.float64), "tau": torch.tensor(0.5, dtype=torch.float64)}
    filtered: dict[str, Any] | None = None if options_for_launches() is None else {"guard_filter_fn": without_globals}
    for block_size, dtype, head_dim, softcap, window, scale in VARIANTS[:count]:
        own = types.FunctionType(_chosen.__code__.replace(), _chosen.__globals__, _chosen.__name__)
        run = torch.compile(own, fullgraph=True, backend=backend, options=filtered)
        query, key = (torch.zeros(1, heads, 300, head_dim, dtype=dtype) for heads in (4, 2))
        inputs = AttentionInputs(with_dynamic(query, 2), with_dynamic(key, 2), None, scale, softcap, window)
        for method, with_stats in itertools.product(("flexprefill", "hybrid"), (False, True)):
            options: dict[str, Any] = {"method": method, "row_stride": 16 if softcap else 8}
            config = Config(0.5, 0.5, block_size=block_size, min_budget=block_size, **options)
            fixed = {name: value for name, value in config.options.items() if name not in numbers}
            tensors = {name: value for name, value in numbers.items() if name in config.options}
            choose, statistics = config.selector.method.choose, STATISTICS if with_stats else ()
            try:
                run(inputs, block_size, choose, fixed, tensors, with_stats, statistics, True, None)
            except TracedError:
                print("traced", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]))
