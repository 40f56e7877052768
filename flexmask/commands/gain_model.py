"""Measures a model for ``flexmask gain``: the work without attention, and one prompt."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from flexmask.commands.gain_times import ROUNDS, dense_calls, fastest_dense, seconds_in_turns, select_all, wait
from flexmask.integrations.huggingface import PrefillRun, sparse_prefill
from flexmask.integrations.huggingface.call import PrefillCall
from flexmask.integrations.huggingface.prefill import opened
from flexmask.integrations.record import RunSummary
from flexmask.integrations.tune.loss_gradient import logits_of, scored_tokens
from flexmask.settings import PrefillSettings

# experts per token, and all experts
_CHOSEN = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "top_k_experts")
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
# log-probabilities at a time in float32
_AT_ONCE = 256


def weights_per_token(config: Any) -> int:
    """Weights that multiply a token in the layers: matrices without embeddings and head, and its share of experts."""
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config)
    outer = {id(module.weight) for module in (model.get_input_embeddings(), model.get_output_embeddings()) if module is not None}
    text = config.get_text_config()
    chosen, experts = (next((n for name in names if (n := getattr(text, name, None))), None) for names in (_CHOSEN, _EXPERTS))
    share = chosen / experts if isinstance(chosen, int) and isinstance(experts, int) else 1.0
    number = 0.0
    for name, weight in model.named_parameters():
        if weight.ndim > 1 and id(weight) not in outer:
            number += weight.numel() * (share if ".experts." in name else 1.0)
    return int(number)


@torch.no_grad()
def prompt_gain(
    model: PreTrainedModel, ids: Tensor, settings: PrefillSettings, progress: Callable[[int, int], None]
) -> tuple[RunSummary, dict[str, Any], dict[str, float] | None]:
    """The summary of one prompt, times of all attention layers by round, and the error; neither if every layer runs dense.

    Three prefills: sparse, dense, and one that times each layer both ways.
    """
    ids = ids.to(model.device)
    with sparse_prefill(model, settings=settings) as run:
        sparse = log_probs(model, ids)
    progress(1, 3)
    summary = run.summary()
    if all(layer.ran == "dense" for layer in summary.layers):
        return summary, {}, None
    dense = log_probs(model, ids)
    progress(2, 3)
    timed = _Timed(model.device)
    start = time.perf_counter()
    with opened(model, PrefillRun(settings, collect_stats=False), timed):
        last = {"logits_to_keep": 1} if "logits_to_keep" in inspect.signature(model.forward).parameters else {}
        model(input_ids=ids, use_cache=False, **last)
    wait(model.device)
    rest = max(0.0, time.perf_counter() - start - timed.spent)
    progress(3, 3)
    error = {
        "tokens": len(dense),
        "log_prob_change": float((sparse - dense).abs().mean()),
        "loss_dense": -float(dense.mean()),
        "loss_sparse": -float(sparse.mean()),
    }
    return summary, {"rest_seconds": rest, **timed.times(summary.density)}, error


@torch.no_grad()
def answers(model: PreTrainedModel, ids: Tensor, settings: PrefillSettings, new_tokens: int) -> dict[str, list[int]]:
    """Greedy new tokens after a prompt, dense and sparse."""
    ids, generate = ids.to(model.device), cast(Any, model).generate
    asked = {"attention_mask": torch.ones_like(ids), "do_sample": False, "max_new_tokens": new_tokens}
    dense = generate(ids, **asked)
    with sparse_prefill(model, settings=settings, collect_stats=False):
        sparse = generate(ids, **asked)
    return {name: ids_out[0, ids.shape[1] :].tolist() for name, ids_out in (("dense", dense), ("sparse", sparse))}


class _Timed:
    """Serves a prefill, and times flexmask's call and the fastest dense kernel in every attention call."""

    def __init__(self, device: torch.device) -> None:
        self._dense, self._attention, self._selection = np.zeros((3, ROUNDS))
        self.spent = 0.0
        self._kernels: dict[Any, str] = {}
        self._device = device

    def __call__(self, call: PrefillCall) -> Tensor:
        wait(self._device)
        start, out = time.perf_counter(), call.attention()
        inputs = call.inputs.prepared()
        if call.reason_dense() is not None:
            (dense,) = seconds_in_turns([call.attention], self._device, warm_up=False)
            whole, selection = dense, np.zeros(ROUNDS)
        else:
            shape = (*inputs.query.shape[1:], inputs.key.shape[1], inputs.window)
            first = shape not in self._kernels
            kernel = self._kernels.setdefault(shape, fastest_dense(inputs)) if first else self._kernels[shape]
            select = partial(select_all, inputs, call.selector.for_inputs(inputs), call.settings.max_mask_bytes)
            calls: list[Callable[[], Any]] = [call.attention, dense_calls(inputs)[kernel], select]
            whole, dense, selection = seconds_in_turns(calls, self._device, warm_up=first)
        self._dense += dense
        self._selection += selection
        self._attention += np.maximum(0.0, whole - selection)
        wait(self._device)
        self.spent += time.perf_counter() - start
        return out

    def times(self, density: float | None) -> dict[str, Any]:
        """As `flexmask.commands.gain_times.model_times`."""
        sparse = {"density": density, "selection_seconds": self._selection, "attention_seconds": self._attention}
        kernel = ", ".join(sorted({*self._kernels.values()}))
        return {"dense": {"kernel": kernel, "attention_seconds": self._dense}, "sparse": [sparse]}


def log_probs(model: PreTrainedModel, ids: Tensor) -> Tensor:
    """Log-probabilities of up to `MOST_SCORED` evenly spaced tokens of a prompt, float32 on the CPU."""
    scored = scored_tokens(ids[0])
    logits = logits_of(model, ids[0], scored)
    targets = ids[0, scored + 1].to(logits.device)
    parts = zip(logits.split(_AT_ONCE), targets.split(_AT_ONCE), strict=True)
    return torch.cat([-F.cross_entropy(part.float(), target, reduction="none") for part, target in parts]).cpu()
