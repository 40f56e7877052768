"""Prefills of one prompt for ``flexmask gain``, dense and sparse: their times, and the error."""

from __future__ import annotations

import inspect
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from flexmask.commands.loading import remark_if_short
from flexmask.commands.options import CommandError
from flexmask.commands.output import Advance, Output
from flexmask.environment import device_name
from flexmask.integrations.huggingface import sparse_prefill
from flexmask.settings import PrefillSettings

ROUNDS = 3  # timed prefills of each kind, in turns, so that a slow moment of the machine affects both
MAX_SCORED = 4096  # tokens: their logits are the largest tensor of a long prompt
_NOT_TIMED = {"low_heads": None, "density": 1.0, "ratio": None, "error": None}
_TOKENS_AT_ONCE = 256  # tokens whose log-probabilities are computed at a time, in float32


def measure_prompt(
    model: PreTrainedModel, ids: Tensor, settings: PrefillSettings, minutes: float, output: Output
) -> dict[str, Any]:
    """Density, error and times of one prompt, (1, length), from rounds that fit into `minutes`; CommandError if none fits."""
    ids, length, max_seconds = ids.to(model.device), ids.shape[1], 60 * minutes
    too_short = settings.call_options.policy.size_reason(length, length)
    if too_short:
        remark_if_short(output, settings, length)
        layers = len({layer.layer_idx for layer in _layers(model)})
        measurements = {"layers": {"dense": layers}, "reasons": {too_short: layers}, **_NOT_TIMED}
    else:
        rounds = rounds_that_fit(model, ids, settings, max_seconds, output)
        with output.progress(f"{2 * rounds} prefills, by layer") as advance, layer_progress(model, 2 * rounds, advance):
            measurements = _measure_rounds(model, ids, settings, rounds, max_seconds, output)
    facts = {"type": type(model.config).__name__, "device": device_name(model.device), "torch": torch.__version__}
    facts |= {"dtype": str(model.dtype).removeprefix("torch."), "dense": model.config._attn_implementation}
    return {"tokens": length, **facts, "settings": {"method": settings.method, **settings.to_dict()}, **measurements}


@torch.no_grad()
def rounds_that_fit(model: PreTrainedModel, ids: Tensor, settings: PrefillSettings, max_seconds: float, output: Output) -> int:
    """Number of rounds that fit into `max_seconds`, by the time of a layer; remarks on the times; CommandError if none fits."""
    length, sparse = ids.shape[1], 0.0
    with output.progress(f"timing one layer on {length:,} tokens"):
        dense = prefill_seconds(model, ids)
    output.remark(f"Estimated from one layer: a dense prefill of {length:,} tokens takes {_duration(dense)}.")
    if dense < max_seconds:
        compiles = "timing one sparse, which compiles first (half a minute or more)"
        with output.progress(compiles), sparse_prefill(model, settings=settings):
            sparse = prefill_seconds(model, ids)
        output.remark(f"A sparse prefill takes {_duration(sparse)}.")
    rounds = min(1 + ROUNDS, int(max_seconds / (dense + sparse)))
    if rounds == 0:
        problem = f"a dense and a sparse prefill take more than {max_seconds / 60:g} min here"
        remedy = "Use a GPU, a shorter prompt, or more --minutes"
        raise CommandError(f"{problem}, so neither gain nor error is measured. {remedy}")
    output.remark(f"Next: {rounds} of each in turns, about {_duration(rounds * (dense + sparse))} in all.")
    return rounds


@torch.no_grad()
def _measure_rounds(
    model: PreTrainedModel, ids: Tensor, settings: PrefillSettings, planned: int, max_seconds: float, output: Output
) -> dict[str, Any]:
    """Measure prefills in turns; times leave out the first round unless it is the only one. One prefill if it runs dense."""
    rounds: list[tuple[float, float]] = []  # seconds, sparse and dense
    for number in range(planned):
        start = time.perf_counter()
        with sparse_prefill(model, settings=settings, collect_stats=number == 0) as run:
            sparse = log_probs(model, ids)
        sparse_seconds = time.perf_counter() - start
        if number == 0:
            summary = run.summary()
            layers = Counter("dense" if layer.ran == "dense" else "sparse" for layer in summary.layers)
            reasons = Counter(reason for layer in summary.layers for reason in sorted(layer.reasons))
            facts: dict[str, Any] = {"layers": dict(layers), "reasons": dict(reasons), "low_heads": summary.warning}
            if not layers["sparse"]:
                return facts | _NOT_TIMED
        output.remark(f"prefill {2 * number + 1} of {2 * planned}, sparse: {_duration(sparse_seconds)}")
        start = time.perf_counter()
        dense = log_probs(model, ids)
        dense_seconds = time.perf_counter() - start
        rounds.append((sparse_seconds, dense_seconds))
        seconds, rounds_left = sum(map(sum, rounds)), planned - len(rounds)
        to_go = f"; about {_duration(rounds_left * seconds / len(rounds))} to go" if rounds_left else ""
        output.remark(f"prefill {2 * number + 2} of {2 * planned}, dense: {_duration(dense_seconds)}{to_go}")
        if rounds_left and seconds + seconds / len(rounds) > max_seconds:
            output.remark(f"Slower than planned: the other {rounds_left} of {planned} rounds are left out.")
            break
    timed_rounds = rounds[1:] or rounds
    ratios = sorted(dense_s / sparse_s for sparse_s, dense_s in timed_rounds)
    sparse_seconds, dense_seconds = (median(times) for times in zip(*timed_rounds, strict=True))
    times = {"sparse_seconds": sparse_seconds, "dense_seconds": dense_seconds, "ratio": dense_seconds / sparse_seconds}
    losses = {"loss_dense": -float(dense.mean()), "loss_sparse": -float(sparse.mean())}
    error = {"tokens": len(dense), "log_prob_change": float((sparse - dense).abs().mean()), **losses}
    facts |= {**times, "density": summary.density, "runs": len(timed_rounds), "ratios": [ratios[0], ratios[-1]], "error": error}
    return facts


def _duration(seconds: float) -> str:
    return f"{seconds:.2g} s" if seconds < 10 else f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.1f} min"


class _StopPrefill(Exception):
    """Ends a prefill after its second layer."""


def prefill_seconds(model: PreTrainedModel, ids: Tensor) -> float:
    """Estimated seconds of a prefill, (1, length): the time of its second layer times the number of layers."""
    layers = _layers(model)
    numbers, ends = {layer.layer_idx for layer in layers}, dict[Any, float]()

    def note(layer: Any, _: Any, result: Any) -> None:
        first = result if isinstance(result, Tensor) else result[0]
        first.flatten()[0].item()  # waits for a GPU
        ends.setdefault(layer.layer_idx, time.perf_counter())
        if len(ends) == 2:
            raise _StopPrefill

    start = time.perf_counter()
    with _hooked(layers, note):
        try:
            log_probs(model, ids)
        except _StopPrefill:
            first, second = ends.values()
            return (second - first) * len(numbers)
        return time.perf_counter() - start


def log_probs(model: PreTrainedModel, ids: Tensor) -> Tensor:
    """Log-probabilities of up to `MAX_SCORED` evenly spaced tokens of a prompt, (1, length), float32 on the CPU."""
    length = ids.shape[1]
    positions = torch.linspace(0, length - 2, min(length - 1, MAX_SCORED), device=ids.device).round().long()
    # a model that is spread over devices would not move the indices to the device of its logits
    one_device = len({parameter.device for parameter in model.parameters()}) == 1
    keeps_some = one_device and "logits_to_keep" in inspect.signature(model.forward).parameters
    logits: Tensor = model(input_ids=ids, use_cache=False, **({"logits_to_keep": positions} if keeps_some else {})).logits[0]
    logits = logits if keeps_some else logits[positions.to(logits.device)]
    parts = zip(logits.split(_TOKENS_AT_ONCE), ids[0, positions + 1].to(logits.device).split(_TOKENS_AT_ONCE), strict=True)
    return torch.cat([-F.cross_entropy(part.float(), target, reduction="none") for part, target in parts]).cpu()


def _layers(model: PreTrainedModel) -> list[Any]:
    return [module for module in model.modules() if getattr(module, "layer_idx", None) is not None]


def _hooked(layers: list[Any], hook: Callable[..., None]) -> ExitStack:
    """A context in which `hook` is called after each forward of a layer."""
    hooks = ExitStack()
    for layer in layers:
        hooks.enter_context(layer.register_forward_hook(hook))
    return hooks


@contextmanager
def layer_progress(model: PreTrainedModel, prefills: int, advance: Advance) -> Iterator[None]:
    """Advance the progress at each layer of `prefills` prefills."""
    layers = _layers(model)
    done, total = 0, prefills * len(layers)

    def count(*_: Any) -> None:
        nonlocal done
        done += 1
        advance(min(done, total), total)

    with _hooked(layers, count):
        yield
