"""Counts compilations while something runs: graphs by torch.compile, and kernels by Triton."""

from __future__ import annotations

from typing import Any


class Compilations:
    """``with Compilations() as compiled: ...`` counts graphs and Triton kernels that are compiled inside.

    Attributes
    ----------
    number : int
        Graphs and kernels, those found in a cache on disk included.
    names : list of str
        The kernels' names.
    """

    def __enter__(self) -> Compilations:
        from triton import knobs

        self.names: list[str] = []
        self.number = 0
        self._graphs = _graphs()
        self._before = before = knobs.runtime.jit_post_compile_hook

        def hook(*arguments: Any, **options: Any) -> Any:
            self.names.append(str(getattr(options.get("fn"), "name", options.get("fn"))))
            return before(*arguments, **options) if before is not None else None

        knobs.runtime.jit_post_compile_hook = hook
        return self

    def __exit__(self, *error: object) -> None:
        from triton import knobs

        knobs.runtime.jit_post_compile_hook = self._before
        self.number = _graphs() - self._graphs + len(self.names)


def _graphs() -> int:
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"])
