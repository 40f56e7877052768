"""How long a FlexPrefill mask and its attention take beside dense attention, at Llama-3.1-8B's shape (small on a CPU)."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import BlockMask

from bench.inputs import structured_prompt
from flexmask import FlexPrefillStats, flexprefill_attention, flexprefill_mask
from flexmask.base.inputs import attention_inputs
from flexmask.flex.backend import flash_available
from flexmask.flex.run import run_flex_attention

GPU = torch.cuda.is_available()
LENGTHS = (8192, 32768, 131072) if GPU else (4096, 8192)
BACKENDS = ("triton", *(("flash",) if flash_available() else ())) if GPU else ("auto",)
GAMMA = 0.9
DENSITY = 0.15

Timed = Callable[..., float]


@cache
def _prompt(tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    if GPU:
        return structured_prompt(tokens, DENSITY)
    return structured_prompt(tokens, DENSITY, num_heads=8, num_kv_heads=2, head_dim=128, device="cpu", dtype=torch.float32)


@cache
def _density(tokens: int) -> float:
    query, key, _ = _prompt(tokens)
    with torch.no_grad():
        _, stats = cast(tuple[BlockMask, FlexPrefillStats], flexprefill_mask(query, key, GAMMA, return_stats=True))
    return round(float(stats.density.mean()), 4)


@pytest.fixture(autouse=True, scope="module")
def _free_prompts() -> Any:
    yield
    _prompt.cache_clear()


@pytest.mark.parametrize("tokens", LENGTHS)
def bench_dense(timed: Timed, tokens: int) -> None:
    query, key, value = _prompt(tokens)
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION if GPU else SDPBackend.FLASH_ATTENTION):
        timed(
            lambda: F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True),
            what="dense",
            tokens=tokens,
        )


@pytest.mark.parametrize("tokens", LENGTHS)
def bench_mask(timed: Timed, tokens: int) -> None:
    query, key, _ = _prompt(tokens)
    timed(lambda: flexprefill_mask(query, key, GAMMA), what="mask", tokens=tokens, density=_density(tokens))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("tokens", LENGTHS)
def bench_kernel(timed: Timed, tokens: int, backend: str) -> None:
    query, key, value = _prompt(tokens)
    with torch.no_grad():
        mask = cast(BlockMask, flexprefill_mask(query, key, GAMMA))

    def causal(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return kv_idx <= q_idx

    mask.mask_mod = causal  # compiled attention follows the lists; partial blocks need the causal edge only
    inputs = attention_inputs(query, key, value)
    kernel = "cpu" if backend == "auto" else backend
    timed(
        lambda: run_flex_attention(inputs, mask, kernel),
        what=f"attention alone, {backend}",
        tokens=tokens,
        density=_density(tokens),
    )


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("tokens", LENGTHS)
def bench_attention(timed: Timed, tokens: int, backend: str) -> None:
    query, key, value = _prompt(tokens)
    timed(
        lambda: flexprefill_attention(query, key, value, GAMMA, backend=backend, dense_below=0),
        what=f"mask and attention, {backend}",
        tokens=tokens,
        density=_density(tokens),
    )
