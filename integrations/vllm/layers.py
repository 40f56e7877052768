"""The role of one attention layer: sparse prefill with these options, or the engine's own kernel for this reason."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from flexmask.attend import RunOptions
from flexmask.base.checks import HEAD_DIMS
from flexmask.base.inputs import AttentionInputs
from flexmask.base.options import pairs_by_head
from flexmask.integrations.huggingface.settings import PrefillSettings
from flexmask.integrations.vllm.pages import FP8_CACHES
from flexmask.selector import Selector

# arguments of an attention implementation that are served, or looked at by name
_KNOWN = {"num_heads", "head_size", "scale", "num_kv_heads", "alibi_slopes", "sliding_window", "kv_cache_dtype"}
_KNOWN |= {"logits_soft_cap", "attn_type", "kv_sharing_target_layer_name", "sinks"}
# multi-head latent attention
_LATENT = {"q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "qk_head_dim", "v_head_dim", "kv_b_proj"}
# a chunk of whole and broken blocks at the end of a prompt: what a method must serve
_CHUNK = (400, 1000)


@dataclass(frozen=True, eq=False)
class SparseLayer:
    """A layer whose long prefills run sparse: its shape on this rank, its scores, its selector, and how its calls run."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    scale: float
    softcap: float | None
    window: int | None
    has_sinks: bool
    selector: Selector
    run: RunOptions  # at any length that the plan of a step lets through
    dense_below: int  # tokens: what the plan does not let through

    @property
    def groups(self) -> int:
        """Query heads of a key head."""
        return self.num_heads // self.num_kv_heads

    @property
    def variant(self) -> tuple[Any, ...]:
        """Everything that its kernels are compiled for: all but the options that are numbers on the device."""
        method, options = self.selector.method, self.selector.options
        numbers = {*method.shares, *method.pairs, *(name for name in method.floats if options[name])}
        fixed = tuple((name, value) for name, value in options.items() if name not in numbers)
        shape = (
            self.num_heads,
            self.num_kv_heads,
            self.head_dim,
            self.v_head_dim,
            self.scale,
            self.softcap,
            self.window,
            self.has_sinks,
        )
        return (*shape, method.name, self.selector.block_size, fixed)

    def inputs_of(self, rows: int, tokens: int, device: torch.device) -> AttentionInputs:
        """Inputs of this layer's shape, for what depends on shapes alone: they take no memory."""
        one = torch.empty(1, dtype=torch.bfloat16, device=device)
        query = one.expand(1, self.num_heads, rows, self.head_dim)
        key = one.expand(1, self.num_kv_heads, tokens, self.head_dim)
        return AttentionInputs(query, key, key, self.scale, self.softcap, self.window)


def layer_number(name: str) -> int | None:
    """Index of the layer with a name such as ``model.layers.3.self_attn.attn``; None unless it holds one number."""
    numbers = [int(part) for part in name.split(".") if part.isdigit()]
    return numbers[0] if len(numbers) == 1 else None


def role_of(
    number: int | None,
    given: Mapping[str, Any],
    defaults: Mapping[str, Any],
    settings: PrefillSettings,
    dtype: torch.dtype,
    rank: int = 0,
    ranks: int = 1,
) -> SparseLayer | str:
    """The role of one layer: its options on one rank of a tensor-parallel group, or why the engine's own kernel serves all of it.

    Parameters
    ----------
    number
        `layer_number`, None for a layer without.
    given, defaults
        The arguments that vLLM made the implementation with, and the defaults of the others, by name.
    settings, dtype
        Of the model.
    rank, ranks
        vLLM gives the ranks equal shares of the query heads, in order, and options by head are shared out in the same way.

    Raises
    ------
    TypeError, ValueError
        If an option by head is not of as many heads as the layer has on all ranks, or the method does not serve chunks of any
        length with the layer's window and soft cap.
    """
    reason = _reason_by_arguments(number, given, defaults, dtype)
    if reason is not None:
        return reason
    assert number is not None
    run, window = settings.run_options, given.get("sliding_window")
    if number in settings.dense_layers:
        return "in dense_layers"
    reason = run.policy.by_window(window)
    if reason is not None:
        return reason
    # single heads are dense as in any other call
    always = run.policy._replace(dense_below=min(run.policy.dense_below, 1))
    num_heads, is_latent = given["num_heads"], "kv_lora_rank" in given
    layer = SparseLayer(
        num_heads=num_heads,
        # latent rows are parted among all heads
        num_kv_heads=num_heads if is_latent else given.get("num_kv_heads") or num_heads,
        head_dim=given["qk_head_dim" if is_latent else "head_size"],
        v_head_dim=given["v_head_dim" if is_latent else "head_size"],
        scale=float(given["scale"]),
        softcap=given.get("logits_soft_cap") or None,
        window=window,
        has_sinks=given.get("sinks") is not None,
        selector=_of_rank(settings.selector(number), number, num_heads, rank, ranks),
        run=run._replace(policy=always),
        dense_below=run.policy.dense_below,
    )
    keeps_all = layer.selector.for_inputs(layer.inputs_of(*_CHUNK, torch.device("cpu")).placed()).keeps_all
    return run.policy.by_selection(keeps_all) or layer


def _reason_by_arguments(
    number: int | None, given: Mapping[str, Any], defaults: Mapping[str, Any], dtype: torch.dtype
) -> str | None:
    is_latent = "kv_lora_rank" in given
    known = _KNOWN | _LATENT if is_latent else _KNOWN
    unknown = [name for name, value in given.items() if name not in known and not _same(value, defaults.get(name))]
    cache, caches = given.get("kv_cache_dtype") or "auto", () if is_latent else FP8_CACHES
    head_dim = given["qk_head_dim" if is_latent else "head_size"]
    if number is None:
        return "no layer number in its name"
    if getattr(given.get("attn_type"), "value", given.get("attn_type")) not in (None, "decoder"):
        return f"attention of type {given['attn_type']}"
    if given.get("alibi_slopes") is not None:
        return "ALiBi"
    if given.get("kv_sharing_target_layer_name") is not None:
        return "it reads another layer's cache"
    if cache not in ("auto", str(dtype).removeprefix("torch."), *caches):
        return f"a cache of {cache}"
    if unknown:
        return f"{unknown[0]}, which flexmask does not know"
    if head_dim not in HEAD_DIMS:
        return f"head_dim {head_dim} outside {HEAD_DIMS[0]} to {HEAD_DIMS[-1]}"
    return None


def _of_rank(selector: Selector, number: int, num_heads: int, rank: int, ranks: int) -> Selector:
    """The selector with the numbers of the `num_heads` heads of this rank."""
    every, own = num_heads * ranks, slice(rank * num_heads, (rank + 1) * num_heads)
    method, options = selector.method, dict(selector.options)
    for name in method.shares:
        value = options[name]
        if isinstance(value, tuple):
            if len(value) != every:
                raise ValueError(f"{name} must hold one number a head, {every} in layer {number}; got {len(value)}")
            options[name] = value[own]
    for name, make in method.pairs.items():
        value = make(every) if make is not None and options[name] is None else options[name]
        pairs = pairs_by_head(name, value, every)
        options[name] = pairs[own] if len(pairs) > 1 else pairs
    return replace(selector, options=options)


def _same(value: Any, default: Any) -> bool:
    return value is default or (not isinstance(value, Tensor) and value == default)
