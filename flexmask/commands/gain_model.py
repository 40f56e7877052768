"""Prefills of one prompt for ``flexmask gain``, dense and sparse: their times, and the error."""

from __future__ import annotations

import inspect
import math
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from flexmask.commands.loading import remark_if_short
from flexmask.commands.options import option_errors
from flexmask.commands.output import Advance, Output
from flexmask.environment import device_name
from flexmask.integrations.huggingface import sparse_prefill
from flexmask.integrations.huggingface.model_config import settings_for
from flexmask.settings import Named, PrefillSettings

ROUNDS = 3  # timed prefills of each, in turns: a slow moment of the machine then meets both
MOST_SCORED = 4096  # tokens: their logits are the largest tensor of a long prompt
_AT_ONCE = 256  # log-probabilities at a time in float32
_MOST_SECONDS = 600.0  # on a CPU; rounds that would take longer are left out


def of_prompt(model: PreTrainedModel, ids: Tensor, chosen: Named | None, output: Output) -> dict[str, Any]:
    """Density, error and times of one prompt, (1, length).

    `chosen` settings, else those in the config, else the defaults; checked for the model.
    """
    with option_errors("--method", "--gamma", "--min-budget", "--dense-below", otherwise="--option"):
        settings = settings_for(model.config.get_text_config(), chosen)
        settings.check_model(model.config.get_text_config())
    remark_if_short(output, settings, ids.shape[1])
    ids, prefills = ids.to(model.device), 2 * (1 + ROUNDS)
    with output.progress(f"{prefills} prefills of {ids.shape[1]:,} tokens") as advance, by_layer(model, prefills, advance):
        measured = _measured(model, ids, settings, output)
    about = {"type": type(model.config).__name__, "device": device_name(model.device), "torch": torch.__version__}
    about |= {"dtype": str(model.dtype).removeprefix("torch."), "dense": model.config._attn_implementation}
    return {**about, "settings": {"method": settings.method, **settings.to_dict()}, **measured}


@torch.no_grad()
def _measured(model: PreTrainedModel, ids: Tensor, settings: PrefillSettings, output: Output) -> dict[str, Any]:
    """Prefills in turns, the first of each not timed if there are others; one if every layer runs dense."""
    rounds: list[tuple[float, float]] = []  # seconds, sparse and dense
    begin, on_cpu = time.perf_counter(), model.device.type == "cpu"
    for number in range(1 + ROUNDS):
        start = time.perf_counter()
        with sparse_prefill(model, settings=settings, collect_stats=number == 0) as run:
            sparse = log_probs(model, ids)
        middle = time.perf_counter()
        if number == 0:
            summary = run.summary()
            layers = Counter("dense" if layer.ran == "dense" else "sparse" for layer in summary.layers)
            reasons = Counter(reason for layer in summary.layers for reason in sorted(layer.reasons))
            found = {"tokens": ids.shape[1], "layers": dict(layers), "reasons": dict(reasons), "low_heads": summary.warning}
            if not layers["sparse"]:
                return {**found, "density": 1.0, "ratio": None, "error": None}
            remark_wait(output, middle - start, on_cpu)
        dense = log_probs(model, ids)
        end = time.perf_counter()
        rounds.append((middle - start, end - middle))
        if on_cpu and (end - begin) * (number + 2) / (number + 1) > _MOST_SECONDS:
            break
    timed = rounds[1:] or rounds
    if len(rounds) < 1 + ROUNDS:
        counted = "one, which compiled too" if len(rounds) == 1 else f"{len(timed)}"
        output.remark(f"{ROUNDS} timed rounds would take over ten minutes; times are of {counted}.")
    ratios = sorted(whole / part for part, whole in timed)
    seconds = {"sparse_seconds": median(part for part, _ in timed), "dense_seconds": median(whole for _, whole in timed)}
    times = {**seconds, "ratio": seconds["dense_seconds"] / seconds["sparse_seconds"], "ratios": [ratios[0], ratios[-1]]}
    losses = {"loss_dense": -float(dense.mean()), "loss_sparse": -float(sparse.mean())}
    error = {"tokens": len(dense), "log_prob_change": float((sparse - dense).abs().mean()), **losses}
    return {**found, "density": summary.density, "runs": len(timed), **times, "error": error}


def remark_wait(output: Output, seconds: float, on_cpu: bool) -> None:
    """Remark what is expected of a wait of more than half a minute, after the first prefill's seconds."""
    left = (1 + 2 * ROUNDS) * seconds
    if on_cpu:  # at least a dense prefill, which is slower
        left = max(min(left, _MOST_SECONDS - seconds), 2 * seconds)
    if left > 30:
        output.remark(f"The first prefill took {seconds:,.0f} s (it compiles); the others take about {math.ceil(left / 60)} min.")


def log_probs(model: PreTrainedModel, ids: Tensor) -> Tensor:
    """Log-probabilities of up to `MOST_SCORED` evenly spaced tokens of a prompt, (1, length), float32 on the CPU."""
    length = ids.shape[1]
    before = torch.linspace(0, length - 2, min(length - 1, MOST_SCORED), device=ids.device).round().long()
    # indices would stay on the first device of a model that is spread over several
    one_device = len({parameter.device for parameter in model.parameters()}) == 1
    keeps = one_device and "logits_to_keep" in inspect.signature(model.forward).parameters
    logits: Tensor = model(input_ids=ids, use_cache=False, **({"logits_to_keep": before} if keeps else {})).logits[0]
    logits = logits if keeps else logits[before.to(logits.device)]
    parts = zip(logits.split(_AT_ONCE), ids[0, before + 1].to(logits.device).split(_AT_ONCE), strict=True)
    return torch.cat([-F.cross_entropy(part.float(), target, reduction="none") for part, target in parts]).cpu()


@contextmanager
def by_layer(model: PreTrainedModel, prefills: int, advance: Advance) -> Iterator[None]:
    """Advance at each layer of so many prefills."""
    layers = [module for module in model.modules() if getattr(module, "layer_idx", None) is not None]
    done, total = 0, prefills * len(layers)

    def count(*_: Any) -> None:
        nonlocal done
        done += 1
        advance(min(done, total), total)

    handles = [layer.register_forward_hook(count) for layer in layers]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
