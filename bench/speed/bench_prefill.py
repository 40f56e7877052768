"""The short benchmark: ``make bench``, or ``pytest bench --benchmark-only``.

Dense kernels, masks and calls on the structured workload, in Llama-3.1-8B's shape or, on a CPU, in a smaller one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache

import pytest
import torch

from bench import ON_GPU
from bench.prompts.structured import SHAPE, Tensors, named_density, structured_prompt
from bench.speed import calls
from bench.speed.run import DEFAULTS, OURS

LENGTHS = (8192, 32768, 131072) if ON_GPU else (4096, 8192)
DENSE = ("dense cuDNN", "dense FlashAttention-2", "dense flex flash") if ON_GPU else ("dense SDPA",)

Timed = Callable[..., None]
pytestmark = pytest.mark.parametrize("tokens", LENGTHS)


@cache
def _prompt(tokens: int) -> Tensors:
    return structured_prompt(tokens, named_density(tokens), **SHAPE)


@pytest.fixture(autouse=True, scope="module")
def _free_prompts() -> Iterator[None]:
    yield
    _prompt.cache_clear()


@pytest.mark.parametrize("kernel", DENSE)
def bench_dense(timed: Timed, tokens: int, kernel: str) -> None:
    found = calls.dense_calls(_prompt(tokens))
    if kernel not in found:
        pytest.skip(f"{kernel} does not run here")
    timed(found[kernel], what=kernel, tokens=tokens)


@pytest.mark.parametrize("method", OURS)
@pytest.mark.parametrize("what", ["mask", "call"])
def bench_sparse(timed: Timed, tokens: int, what: str, method: str) -> None:
    options = DEFAULTS[method]
    with torch.no_grad():
        density = calls.density(_prompt(tokens), method, options)
    timed(getattr(calls, what)(_prompt(tokens), method, options), what=f"{what} {method}", tokens=tokens, density=density)
