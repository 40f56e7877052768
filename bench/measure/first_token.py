"""Time to first token of a Hugging Face model, with the attention it is set to."""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import DynamicCache

from bench.measure.clock import synchronize
from bench.measure.random_blocks import random_blocks_mask
from bench.measure.stages import GLUE, grouped, kernels_of
from flexmask.integrations.huggingface import flexprefill


@dataclass
class FirstToken:
    """Figures of one kind of attention on one prompt.

    Attributes
    ----------
    method : str
    prompt_tokens : int
    seconds : float
        Time to first token: median of the prefills after the first one, which compiles.
    first_seconds : float
        Time of the prefill that compiles.
    attention_ms, mask_ms, rest_ms : float or None
        GPU time of one prefill: attention kernels, FlexPrefill's kernels, all others. None without a GPU.
    peak_gb : float or None
        Peak device memory, including weights and the first generated tokens.
    density : float or None
        Kept share of the visible blocks, mean over layers and heads.
    tokens : list of int
        The tokens it generates, greedily.
    """

    method: str
    prompt_tokens: int
    seconds: float
    first_seconds: float
    attention_ms: float | None
    mask_ms: float | None
    rest_ms: float | None
    peak_gb: float | None
    density: float | None
    tokens: list[int]


@torch.no_grad()
def prefill(model: Any, ids: Tensor, chunk: int | None = None) -> tuple[Tensor, DynamicCache]:
    """Prefill at once or in chunks of `chunk` tokens; return the logits of the last position, and the cache."""
    cache = DynamicCache(config=model.config)
    for part in ids.split(chunk or ids.shape[1], 1):
        logits = model(input_ids=part, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
    return logits[:, -1], cache


@torch.no_grad()
def generated(model: Any, logits: Tensor, cache: DynamicCache, number: int) -> list[int]:
    """Generate `number` tokens after a prefill, greedily."""
    tokens = [logits.argmax(-1, keepdim=True)]
    while len(tokens) < number:
        logits = model(input_ids=tokens[-1], past_key_values=cache, use_cache=True).logits[:, -1]
        tokens.append(logits.argmax(-1, keepdim=True))
    return [int(token) for token in tokens]


def measure(model: Any, ids: Tensor, name: str, options: argparse.Namespace) -> FirstToken:
    """Measure the attention that the model is set to; leaves `density` open."""
    on_gpu = ids.is_cuda
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    times = []
    for _ in range(1 + options.prefills):
        synchronize()
        start = time.perf_counter()
        logits, cache = prefill(model, ids, options.chunk)
        logits.argmax().item()
        times.append(time.perf_counter() - start)
        if len(times) == 1:
            tokens = generated(model, logits, cache, options.new_tokens)
        del logits, cache
    peak = torch.cuda.max_memory_allocated() / 1e9 if on_gpu else None
    stages = dict[str, float]()
    if on_gpu:
        stages, _ = grouped([kernels_of(partial(prefill, model, ids, options.chunk))])
    return FirstToken(
        name,
        ids.shape[1],
        statistics.median(times[1:]),
        times[0],
        stages.get("attention"),
        sum(value for stage, value in stages.items() if stage not in ("attention", GLUE)) if on_gpu else None,
        stages.get(GLUE),
        peak,
        None,
        tokens,
    )


def density_of(model: Any, ids: Tensor, options: argparse.Namespace) -> float:
    """Return the density in a prefill of its own, since collecting statistics takes time."""
    with flexprefill(model, options.gamma, options.tau, **_dense_below(options)) as run:
        prefill(model, ids, options.chunk)
    return float(torch.stack([stats.density.mean() for calls in run.stats.values() for stats in calls]).mean())


def _dense_below(options: argparse.Namespace) -> dict[str, Any]:
    """Return `dense_below` if the command line sets it."""
    return {} if options.dense_below is None else {"dense_below": options.dense_below}


def ways(model: Any, options: argparse.Namespace) -> Iterator[tuple[str, Callable[[], AbstractContextManager[Any]]]]:
    """Yield each kind of attention to measure: its name, and a context that switches it on."""
    on_gpu = torch.device(options.device).type == "cuda"
    if on_gpu:
        yield "dense (SDPA, cuDNN)", lambda: _dense(SDPBackend.CUDNN_ATTENTION)
    if not on_gpu or options.default_sdpa:
        yield "dense (SDPA)", nullcontext
    if not options.density or not options.shape:
        name = f"FlexPrefill, gamma {options.gamma:g}"
        yield name, partial(flexprefill, model, options.gamma, options.tau, collect_stats=False, **_dense_below(options))
    for density in options.density:
        method = partial(random_blocks_mask, density=density)
        yield f"random blocks, {density:g}", partial(flexprefill, model, method=method, **_dense_below(options))


@contextmanager
def _dense(backend: SDPBackend) -> Iterator[None]:
    with sdpa_kernel([backend, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH], set_priority=True):
        yield
