"""Compilations and exports that another thread holds open."""

import contextlib
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from flexmask import sparse_attention
from flexmask.block_masks import causal_mask
from tests.compile_support import cut


@contextlib.contextmanager
def held_open(work: Callable[[Callable[[], bool]], Any]) -> Iterator[None]:
    """While another thread runs ``work(wait)`` and stands in `wait`; its error is raised afterwards."""
    reached, released = threading.Event(), threading.Event()

    def wait() -> bool:
        reached.set()
        released.wait()
        return True

    def run() -> None:
        try:
            with torch.no_grad():
                work(wait)
        finally:
            reached.set()

    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(run)
        reached.wait()
        try:
            # a call that compiles would wait for ever
            with torch.compiler.set_stance("fail_on_recompile"):
                yield
        finally:
            released.set()
        done.result()


def _while_traced(wait: Callable[[], bool]) -> None:
    constant = torch.compiler.assume_constant_result(wait)
    torch.compile(lambda x: x + 1 if constant() else x, backend="eager")(torch.ones(3))


def _in_the_backend(wait: Callable[[], bool]) -> None:
    torch.compile(lambda x: x + 1, backend=lambda graph, inputs: graph if wait() else None)(torch.ones(3))


def _of_attention(wait: Callable[[], bool]) -> None:
    constant = torch.compiler.assume_constant_result(wait)

    def slow_method(query: Any, key: Any, **options: Any) -> Any:
        mask = causal_mask(query, key, **options)
        own = mask.mask_mod
        mask.mask_mod = lambda b, h, q_idx, kv_idx: own(b, h, q_idx, kv_idx) & constant()
        return mask

    query, key, value = cut(300, batch=1)
    sparse_attention(query, key, value, slow_method, block_size=32, dense_below=0)


class _Exported(torch.nn.Module):
    def __init__(self, wait: Callable[[], bool]) -> None:
        super().__init__()
        self.wait = torch.compiler.assume_constant_result(wait)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 1 if self.wait() else x


def _export(strict: bool) -> Callable[[Callable[[], bool]], Any]:
    return lambda wait: torch.export.export(_Exported(wait), (torch.ones(3),), strict=strict)


HELD: dict[str, Callable[[Callable[[], bool]], Any]] = {
    "torch.compile traces": _while_traced, "a backend compiles": _in_the_backend, "flexmask compiles": _of_attention,
    "torch.export": _export(False),
}  # fmt: skip
# strict, it makes torch forget what was compiled in any thread
STRICT_EXPORT = _export(True)
