"""A self-test of compiled attention: it must equal dense attention under its mask, expanded to pairs of tokens."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flexmask.attention import sparse_attention
from flexmask.base.inputs import AttentionInputs
from flexmask.block_masks.flexprefill import flexprefill_mask
from flexmask.block_masks.hybrid import hybrid_mask
from flexmask.flex.backend import chosen_backend
from flexmask.flex.flash_check import exact_attention

# of outputs around 1, from attention in float64
TOLERANCES = {torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 4e-2}
# with a gamma at which few tokens lose blocks
METHODS = {"hybrid": (hybrid_mask, 0.6), "flexprefill": (flexprefill_mask, 0.3)}
_TOKENS, _HEAD_DIM, _BLOCK_SIZE = 1100, 64, 128


class SelfTest(NamedTuple):
    """The outcome of one case; `tolerance` bounds `difference` from above and `skipped` from below."""

    method: str
    backend: str
    dtype: str
    density: float | None  # kept share of the visible blocks
    difference: float | None  # the largest from dense attention under the expanded mask
    skipped: float | None  # from dense attention without it
    tolerance: float
    seconds: float
    error: str = ""

    @property
    def passed(self) -> bool:
        """True if the outputs agree under the mask, and differ without it."""
        return (
            self.difference is not None
            and self.skipped is not None
            and self.difference <= self.tolerance < self.skipped  # NaN is neither
        )


def self_test(device: torch.device | str) -> Iterator[SelfTest]:
    """Run both methods on each backend of `device`, and yield the outcomes; raises nothing. The first case compiles."""
    device = torch.device(device)
    cases = [("auto", torch.float32)] if device.type == "cpu" else [("triton", torch.float32), ("triton", torch.bfloat16)]
    x = torch.zeros(1, device=device, dtype=torch.bfloat16).expand(1, 1, _TOKENS, _HEAD_DIM)
    if chosen_backend("auto", AttentionInputs(x, x, x, scale=1.0), _BLOCK_SIZE).name == "flash":
        cases.append(("flash", torch.bfloat16))
    for backend, dtype in cases:
        for method in METHODS:
            start = time.perf_counter()
            numbers: tuple[float | None, float | None, float | None] = (None, None, None)
            error = ""
            try:
                numbers = _differences(device, backend, dtype, method)
            except Exception as raised:  # a result of the test
                error = f"{type(raised).__name__}: {str(raised).strip().splitlines()[0] if str(raised).strip() else ''}"
            name = str(dtype).removeprefix("torch.")
            yield SelfTest(method, backend, name, *numbers, TOLERANCES[dtype], time.perf_counter() - start, error)


@torch.no_grad()
def _differences(device: torch.device, backend: str, dtype: torch.dtype, method: str) -> tuple[float, float, float]:
    """Density, and the largest difference from dense attention with and without the mask."""
    query, key, value = (x.to(device, dtype) for x in _inputs())
    make_mask, gamma = METHODS[method]
    options: dict[str, Any] = {"gamma": gamma, "min_budget": 0, "block_size": _BLOCK_SIZE}
    mask, stats = make_mask(query, key, return_stats=True, **options)
    out = sparse_attention(query, key, value, method, backend=backend, dense_below=0, **options).cpu().double()
    blocks, causal = mask.to_dense().bool().cpu(), torch.ones(_TOKENS, _TOKENS, dtype=torch.bool).tril()
    pairs = blocks.repeat_interleave(_BLOCK_SIZE, 2).repeat_interleave(_BLOCK_SIZE, 3)[..., :_TOKENS, :_TOKENS] & causal
    inputs = AttentionInputs(query.cpu(), key.cpu(), value.cpu(), _HEAD_DIM**-0.5)
    off = [float((out - exact_attention(inputs, shown)[0]).abs().max()) for shown in (pairs, causal)]
    return float(stats.density.mean()), off[0], off[1]


def _inputs() -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value with a few directions that carry the attention."""
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(1, heads, _TOKENS, _HEAD_DIM, generator=generator) for heads in (4, 2, 2))
    # runs of a twelfth of the tokens share a topic
    topics = 2 * torch.randn(3, _HEAD_DIM, generator=generator).repeat(4, 1).repeat_interleave(-(-_TOKENS // 12), 0)[:_TOKENS]
    return query + topics, key + topics, value
