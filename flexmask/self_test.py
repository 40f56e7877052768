"""A self-test: compiled attention must equal dense attention under its mask, and masks those of a CPU. Also times."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.benchmark import Timer

from flexmask.attention import sparse_attention
from flexmask.base.inputs import AttentionInputs
from flexmask.block_masks.flexprefill import flexprefill_mask
from flexmask.block_masks.hybrid import hybrid_mask
from flexmask.flex.backend import chosen_backend
from flexmask.flex.flash_case import exact_attention

# the largest difference of outputs around 1 from attention in float64
TOLERANCES = {torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 4e-2}
# mask functions, each with a gamma at which few tokens lose blocks
TESTED = {"hybrid": (hybrid_mask, 0.6), "flexprefill": (flexprefill_mask, 0.3)}
_TOKENS, _HEAD_DIM, _BLOCK_SIZE = 1100, 64, 128
# share of the visible blocks that may differ between devices in float32, because their scores are on a threshold
_OTHER_BLOCKS = 0.01
# timed calls: tokens, query heads, KV heads, head_dim
_TIMED = {"cpu": [(2048, 4, 2, 64), (8192, 4, 2, 64)], "others": [(8192, 32, 8, 128), (32768, 32, 8, 128)]}
_RUNS = 5


class SelfTest(NamedTuple):
    """The outcome of one case; `tolerance` bounds `difference` from above and `unmasked_difference` from below."""

    method: str
    backend: str
    dtype: str
    density: float | None = None  # kept share of the visible blocks
    difference: float | None = None  # the largest from dense attention under the expanded mask
    unmasked_difference: float | None = None  # the largest from dense attention without the mask: large if blocks were dropped
    other_blocks: float | None = None  # share of the visible blocks that the mask of PyTorch's steps on a CPU has otherwise
    tolerance: float = 0.0
    seconds: float = 0.0
    error: str = ""

    @property
    def passed(self) -> bool:
        """True if the outputs agree under the mask, and differ without it, and in float32 the mask is that of a CPU."""
        return (
            self.difference is not None
            and self.unmasked_difference is not None
            and self.other_blocks is not None
            and (self.other_blocks <= _OTHER_BLOCKS or self.dtype != "float32")
            and self.difference <= self.tolerance < self.unmasked_difference  # NaN is neither
        )


def self_test(device: torch.device | str) -> Iterator[SelfTest]:
    """Run both methods on each backend of `device`, and yield the outcomes; raises nothing. The first case compiles."""
    device = torch.device(device)
    cases = [("auto", torch.float32)] if device.type == "cpu" else [("triton", torch.float32), ("triton", torch.bfloat16)]
    x = torch.zeros(1, device=device, dtype=torch.bfloat16).expand(1, 1, _TOKENS, _HEAD_DIM)
    with contextlib.suppress(NotImplementedError):  # torch 2.5 on a CPU
        if chosen_backend("auto", AttentionInputs(x, x, x, scale=1.0), _BLOCK_SIZE, has_mask_mod=False).name == "flash":
            cases.append(("flash", torch.bfloat16))
    for backend, dtype in cases:
        for method in TESTED:
            start = time.perf_counter()
            outcome = SelfTest(method, backend, str(dtype).removeprefix("torch."), tolerance=TOLERANCES[dtype])
            try:
                outcome = outcome._replace(**_differences(device, backend, dtype, method))
            except Exception as raised:  # an error is a result too
                outcome = outcome._replace(error=_first_line(raised))
            yield outcome._replace(seconds=time.perf_counter() - start)


class Timed(NamedTuple):
    """Medians of `_RUNS` calls in seconds: dense, and with `hybrid`, its mask included."""

    tokens: int
    heads: str
    dtype: str
    density: float | None = None
    dense: float | None = None
    sparse: float | None = None
    error: str = ""


@torch.no_grad()
def timed(device: torch.device | str) -> Iterator[Timed]:
    """Time whole causal calls with default options, and yield the outcomes; raises nothing."""
    device = torch.device(device)
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    for tokens, heads, kv_heads, head_dim in _TIMED["cpu" if device.type == "cpu" else "others"]:
        outcome = Timed(tokens, f"{heads} and {kv_heads}, {head_dim} wide", str(dtype).removeprefix("torch."))
        try:
            inputs = [x.to(device, dtype) for x in _inputs(tokens, heads, kv_heads, head_dim)]
            density = float(hybrid_mask(*inputs[:2], return_stats=True)[1].density.mean())
            seconds = []
            for below in (tokens + 1, 0):  # dense and sparse
                names = {"call": sparse_attention, "inputs": inputs, "below": below}
                # a Timer warms up first, and waits for the device
                timer = Timer("call(*inputs, dense_below=below)", globals=names)
                seconds.append(float(torch.tensor([timer.timeit(1).mean for _ in range(_RUNS)]).median()))
            yield outcome._replace(density=density, dense=seconds[0], sparse=seconds[1])
        except Exception as raised:  # an error is a result too
            yield outcome._replace(error=_first_line(raised))


def _first_line(raised: Exception) -> str:
    text = str(raised).strip()
    return f"{type(raised).__name__}: {text.splitlines()[0] if text else ''}"


@torch.no_grad()
def _differences(device: torch.device, backend: str, dtype: torch.dtype, method: str) -> dict[str, Any]:
    """The numbers of a `SelfTest`, by name."""
    query, key, value = (x.to(device, dtype) for x in _inputs())
    make_mask, gamma = TESTED[method]
    options: dict[str, Any] = {"gamma": gamma, "min_budget": 0, "block_size": _BLOCK_SIZE}
    mask, stats = make_mask(query, key, return_stats=True, **options)
    out = sparse_attention(query, key, value, method, backend=backend, dense_below=0, **options).cpu().double()
    blocks, causal = mask.to_dense().bool().cpu(), torch.ones(_TOKENS, _TOKENS, dtype=torch.bool).tril()
    pairs = blocks.repeat_interleave(_BLOCK_SIZE, 2).repeat_interleave(_BLOCK_SIZE, 3)[..., :_TOKENS, :_TOKENS] & causal
    inputs = AttentionInputs(query.cpu(), key.cpu(), value.cpu(), _HEAD_DIM**-0.5)
    difference, unmasked = (float((out - exact_attention(inputs, shown)[0]).abs().max()) for shown in (pairs, causal))
    others = blocks != make_mask(query.cpu(), key.cpu(), **options).to_dense().bool()
    visible = int(torch.ones(blocks.shape[-2:]).tril().sum()) * blocks.shape[1]
    numbers = {"density": float(stats.density.mean()), "difference": difference, "unmasked_difference": unmasked}
    return {**numbers, "other_blocks": float(others.sum()) / visible}


def _inputs(tokens: int = _TOKENS, heads: int = 4, kv_heads: int = 2, head_dim: int = _HEAD_DIM) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value with a few directions that carry the attention."""
    generator = torch.Generator().manual_seed(0)
    sizes = (heads, kv_heads, kv_heads)
    query, key, value = (torch.randn(1, number, tokens, head_dim, generator=generator) for number in sizes)
    # runs of a twelfth of the tokens share a topic
    topics = 2 * torch.randn(3, head_dim, generator=generator).repeat(4, 1).repeat_interleave(-(-tokens // 12), 0)[:tokens]
    return query + topics, key + topics, value
