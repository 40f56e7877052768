"""The short benchmark: FlexPrefill's mask, kernel and whole call against dense attention, in Llama-3.1-8B's shape.

``make bench``, or ``pytest bench --benchmark-only``. Prompts and methods are those of the report's parts; on a CPU the
shape is smaller.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache

import pytest

from bench import ON_GPU
from bench.measure.methods import BACKENDS, warm_up
from bench.measure.variants import DENSE_BASELINE, Variant, call_variants, kernel_variants, mask_variants
from bench.prompts.prompt import DEFAULT_FLOOR, GAMMA, Prompt

LENGTHS = (8192, 32768, 131072) if ON_GPU else (4096, 8192)
_AIM = 0.15
_KERNELS = dict(zip(BACKENDS, kernel_variants(DEFAULT_FLOOR), strict=True))

Timed = Callable[..., float]
pytestmark = pytest.mark.parametrize("tokens", LENGTHS)


@cache
def _prompt(tokens: int) -> Prompt:
    return Prompt("mixture", tokens, DEFAULT_FLOOR, aim=_AIM)


@pytest.fixture(autouse=True, scope="module")
def _free_prompts() -> Iterator[None]:
    yield
    _prompt.cache_clear()


def _time(timed: Timed, variant: Variant, tokens: int) -> None:
    prompt = _prompt(tokens)
    fields = variant.density(prompt)
    warm_up(variant.make, prompt.tensors())
    timed(variant.make(prompt.tensors()), method=variant.method, tokens=tokens, **fields)


def bench_dense(timed: Timed, tokens: int) -> None:
    _time(timed, DENSE_BASELINE, tokens)


def bench_mask(timed: Timed, tokens: int) -> None:
    _time(timed, mask_variants((GAMMA,), DEFAULT_FLOOR)[0], tokens)


@pytest.mark.parametrize("backend", BACKENDS)
def bench_kernel(timed: Timed, tokens: int, backend: str) -> None:
    _time(timed, _KERNELS[backend], tokens)


@pytest.mark.parametrize("backend", BACKENDS)
def bench_attention(timed: Timed, tokens: int, backend: str) -> None:
    _time(timed, call_variants(backend, (GAMMA,), DEFAULT_FLOOR)[0], tokens)
