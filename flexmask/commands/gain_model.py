"""Measures a model for ``flexmask gain``: by its config over random blocks, or on one prompt with its weights."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from flexmask.base.inputs import SparseInputs
from flexmask.commands import gain_times
from flexmask.commands.gain_times import seconds_in_turns, wait
from flexmask.commands.loading import remark_if_short
from flexmask.commands.log_probs import log_probs, logits_of
from flexmask.commands.options import option_errors
from flexmask.commands.output import Advance, Output
from flexmask.environment import device_name
from flexmask.integrations.huggingface import PrefillRun, sparse_prefill
from flexmask.integrations.huggingface.call import PrefillCall
from flexmask.integrations.huggingface.layer_plan import layer_plan
from flexmask.integrations.huggingface.model_config import settings_for
from flexmask.integrations.huggingface.prefill import opened
from flexmask.settings import Named, PrefillSettings

# experts per token, and all experts
_CHOSEN = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "top_k_experts")
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
_MOST_SECONDS = 600.0  # of a prompt's prefills on a CPU, if they can be so short


def of_config(
    config: Any, chosen: Named | None, lengths: Sequence[int], densities: Sequence[float], zero: Tensor, output: Output
) -> dict[str, Any]:
    """Expected times of each length over random blocks of each density, on the device and in the dtype of `zero`, 0-d."""
    text, rows = config.get_text_config(), []
    longest = getattr(text, "max_position_embeddings", None)
    if longest is not None and max(lengths) > longest:
        output.remark(f"{max(lengths):,} tokens exceed the model's max_position_embeddings, {longest:,}")
    with output.progress("timing one length" if len(lengths) == 1 else f"timing {len(lengths)} lengths") as advance:
        advance(0, len(lengths))
        settings = _settings_of(config, chosen)
        speed, weights = gain_times.matmul_speed(max(lengths), text.hidden_size, zero), weights_per_token(config)
        for length in lengths:
            plan = layer_plan(config, settings=settings, tokens=length, device=zero.device, dtype=zero.dtype)
            row = _row(length, (layer.plan for layer in plan), (layer.reason for layer in plan))
            if row["layers"].get("sparse"):
                times = gain_times.model_times(plan, length, densities, settings, speed, zero)
                row |= {**times.document(2 * weights * length / speed), "timed_share_of_heads": times.share}
            rows.append(row)
            advance(len(rows), len(lengths))
    measured = {"source": "random blocks", "matmul_flops_per_second": speed, "weights_per_token": weights, "lengths": rows}
    return {**_about(config, settings, zero.device, zero.dtype), **measured}


def of_prompt(
    model: PreTrainedModel, tokenizer: Any, ids: Tensor, chosen: Named | None, new_tokens: int, output: Output
) -> dict[str, Any]:
    """Density, error and times of one prompt, and with `new_tokens` both answers."""
    settings = _settings_of(model.config, chosen)
    remark_if_short(output, settings, ids.shape[1])
    ids = ids.to(model.device)
    with output.progress(f"three prefills of {ids.shape[1]:,} tokens") as advance, _by_layer(model, 3, advance):
        measured = _prompt_gain(model, ids, settings, output)
    answers = {}
    if new_tokens:
        with output.progress(f"two answers of {new_tokens:,} tokens"):
            answers = _answers(model, tokenizer, ids, settings, new_tokens)
    return {**_about(model.config, settings, model.device, model.dtype), "source": "prompt", **measured, "answers": answers}


def _settings_of(config: Any, chosen: Named | None) -> PrefillSettings:
    """The chosen settings, else those in the config, else the defaults; checked for the model."""
    with option_errors("--method", "--gamma", "--min-budget", "--dense-below", otherwise="--option"):
        settings = settings_for(config.get_text_config(), chosen)
        settings.check_model(config.get_text_config())
    return settings


def _row(tokens: int, plans: Iterable[str], reasons: Iterable[str]) -> dict[str, Any]:
    """A length: its layers by plan, and by reason for not running sparse; `Times.document` adds the times."""
    counts = {"layers": dict(Counter(plans)), "reasons": dict(Counter(filter(None, reasons)))}
    return {"tokens": tokens, **counts, "rest_seconds": 0.0, "dense": None, "sparse": []}


def _about(config: Any, settings: PrefillSettings, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    versions = {"dtype": str(dtype).removeprefix("torch."), "torch": torch.__version__}
    used = {"method": settings.method, **settings.to_dict()}
    return {"type": type(config).__name__, "device": device_name(device), **versions, "settings": used}


def weights_per_token(config: Any) -> int:
    """Weights that multiply a token in the layers: matrices without embeddings and head, and its share of experts."""
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    outer = {id(module.weight) for module in (model.get_input_embeddings(), model.get_output_embeddings()) if module is not None}
    text = config.get_text_config()
    chosen, experts = (next((n for name in names if (n := getattr(text, name, None))), None) for names in (_CHOSEN, _EXPERTS))
    share = chosen / experts if isinstance(chosen, int) and isinstance(experts, int) else 1.0
    number = 0.0
    for name, weight in model.named_parameters():
        if weight.ndim > 1 and id(weight) not in outer:
            number += weight.numel() * (share if ".experts." in name else 1.0)
    return int(number)


@contextmanager
def _by_layer(model: PreTrainedModel, prefills: int, advance: Advance) -> Iterator[None]:
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


@torch.no_grad()
def _prompt_gain(model: PreTrainedModel, ids: Tensor, settings: PrefillSettings, output: Output) -> dict[str, Any]:
    """Three prefills: sparse, dense, and one that times each layer both ways; one if every layer runs dense."""
    start = time.perf_counter()
    with sparse_prefill(model, settings=settings) as run:
        sparse = log_probs(model, ids)
    sparse_seconds = time.perf_counter() - start
    summary = run.summary()
    plans = ("dense" if layer.ran == "dense" else "sparse" for layer in summary.layers)
    row = _row(ids.shape[1], plans, (reason for layer in summary.layers for reason in sorted(layer.reasons)))
    measured = {"lengths": [row], "low_heads": summary.warning, "error": None}
    if not row["layers"].get("sparse"):
        return measured
    # as if dense were no slower: a dense prefill, and every call of both kinds three times
    _remark_wait(output, "The first of three prefills", sparse_seconds, 8 * sparse_seconds, model.device)
    start = time.perf_counter()
    dense = log_probs(model, ids)
    dense_seconds = time.perf_counter() - start
    timing, left = 4 * sparse_seconds + 3 * dense_seconds, _MOST_SECONDS - sparse_seconds - 2 * dense_seconds
    every = min(row["layers"]["sparse"], max(1, math.ceil(timing / max(left, 1e-9)))) if model.device.type == "cpu" else 1
    if every > 1:
        output.remark(f"That is long: of every {every} alike layers the first is timed, and seconds are scaled up.")
    timed = _Timed(model.device, every)
    start = time.perf_counter()
    with opened(model, PrefillRun(settings, collect_stats=False), timed):
        logits_of(model, ids, torch.tensor([ids.shape[1] - 1], device=ids.device))
    wait(model.device)
    rest = max(0.0, time.perf_counter() - start - timed.spent)
    times = timed.times()
    times.density[:] = summary.density
    row |= {**times.document(rest), "timed_share_of_layers": times.share}
    losses = {"loss_dense": -float(dense.mean()), "loss_sparse": -float(sparse.mean())}
    return {**measured, "error": {"tokens": len(dense), "log_prob_change": float((sparse - dense).abs().mean()), **losses}}


def _remark_wait(output: Output, what: str, seconds: float, left: float, device: torch.device) -> None:
    """Remark what a wait of more than half a minute is expected to be."""
    if left > 30:
        # on a CPU of at least a dense prefill and one that times a layer
        left = max(min(left, _MOST_SECONDS), 3 * seconds) if device.type == "cpu" else left
        output.remark(f"{what} took {seconds:,.0f} s (the first compiles); the others take about {math.ceil(left / 60)} min.")


@torch.no_grad()
def _answers(model: Any, tokenizer: Any, ids: Tensor, settings: PrefillSettings, new_tokens: int) -> dict[str, Any]:
    """Greedy new tokens after a prompt, dense and sparse."""
    asked = {"attention_mask": torch.ones_like(ids), "do_sample": False, "max_new_tokens": new_tokens}
    dense = model.generate(ids, **asked)
    with sparse_prefill(model, settings=settings, collect_stats=False):
        sparse = model.generate(ids, **asked)
    new = {"dense": dense[0, ids.shape[1] :].tolist(), "sparse": sparse[0, ids.shape[1] :].tolist()}
    return {name: {"tokens": tokens, "text": tokenizer.decode(tokens, skip_special_tokens=True)} for name, tokens in new.items()}


class _Timed:
    """Serves a prefill, and times flexmask's call and the fastest dense kernel in one of `every` alike attention calls."""

    def __init__(self, device: torch.device, every: int = 1) -> None:
        self.spent, self._device, self._every = 0.0, device, every
        # by kind of call: its times, its calls, and those that were timed
        self._kinds: dict[Any, tuple[gain_times.Times, list[int]]] = {}

    def __call__(self, call: PrefillCall) -> Tensor:
        wait(self._device)
        start, out = time.perf_counter(), call.output()
        inputs, is_dense = call.inputs.prepared(), call.reason_dense() is not None
        kind = (*inputs.query.shape[1:], inputs.key.shape[1], inputs.window, is_dense)
        times, numbers = self._kinds.setdefault(kind, (gain_times.Times(1), [0, 0]))
        if numbers[0] % self._every == 0:
            self._time(call, inputs, times, is_dense)
            numbers[1] += 1
        numbers[0] += 1
        wait(self._device)
        self.spent += time.perf_counter() - start
        return out

    def _time(self, call: PrefillCall, inputs: SparseInputs, times: gain_times.Times, is_dense: bool) -> None:
        if is_dense:
            (dense,) = seconds_in_turns([call.output], self._device, warm_up=False)
            times.add(dense, np.zeros(gain_times.ROUNDS), dense[None])
            return
        first = not times.kernels
        if first:
            times.kernels.add(gain_times.fastest_dense(inputs))
        (kernel,) = times.kernels
        select = partial(gain_times.select_all, inputs, call.selector.for_inputs(inputs), call.settings.max_mask_bytes)
        calls: list[Callable[[], Any]] = [call.output, gain_times.dense_calls(inputs)[kernel], select]
        whole, dense, selection = seconds_in_turns(calls, self._device, warm_up=first)
        times.add(dense, selection, np.maximum(0.0, whole - selection)[None])

    def times(self) -> gain_times.Times:
        """Times of all calls; `share` is that of the calls that were timed."""
        whole, calls, timed = gain_times.Times(1), 0, 0
        for times, (of_kind, measured) in self._kinds.values():
            factor = of_kind / measured
            whole.add(factor * times.dense, factor * times.selection, factor * times.attention)
            whole.kernels |= times.kernels
            calls, timed = calls + of_kind, timed + measured
        whole.share = timed / max(calls, 1)
        return whole
