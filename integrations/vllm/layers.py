"""The shape of an attention layer of vLLM, or why it runs stock, by its name and the arguments of its implementation."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from flexmask.integrations.serving.layers import LayerShape
from flexmask.integrations.vllm.pages import FP8_CACHES

# arguments of an attention implementation that flexmask knows
ARGUMENTS = {
    "num_heads", "head_size", "scale", "num_kv_heads", "alibi_slopes", "sliding_window", "kv_cache_dtype", "logits_soft_cap",
    "attn_type", "kv_sharing_target_layer_name", "sinks",
}  # fmt: skip
# those of multi-head latent attention
LATENT_ARGUMENTS = {
    *ARGUMENTS, "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "qk_head_dim", "v_head_dim", "kv_b_proj",
}  # fmt: skip


def layer_index(name: str) -> int | None:
    """The layer's index in its name, as 3 in ``model.layers.3.self_attn.attn``; None unless the name has exactly one number."""
    numbers = [int(part) for part in name.split(".") if part.isdigit()]
    return numbers[0] if len(numbers) == 1 else None


def shape_of(impl_args: Mapping[str, Any]) -> LayerShape:
    """The shape of one attention layer on this rank, by the arguments of vLLM's implementation."""
    num_heads, is_latent = impl_args["num_heads"], "kv_lora_rank" in impl_args
    return LayerShape(
        num_heads=num_heads,
        num_kv_heads=num_heads if is_latent else impl_args.get("num_kv_heads") or num_heads,
        head_dim=impl_args["qk_head_dim" if is_latent else "head_size"],
        v_head_dim=impl_args["v_head_dim" if is_latent else "head_size"],
        scale=float(impl_args["scale"]),
        softcap=impl_args.get("logits_soft_cap") or None,
        window=impl_args.get("sliding_window"),
        has_sinks=impl_args.get("sinks") is not None,
    )


def layer_reason(impl_args: Mapping[str, Any], dtype: torch.dtype) -> str | None:
    """Return why a layer runs stock in every step, or None; by the arguments of vLLM's implementation."""
    is_latent = "kv_lora_rank" in impl_args
    unknown = [name for name in impl_args if name not in (LATENT_ARGUMENTS if is_latent else ARGUMENTS)]
    cache, caches = impl_args.get("kv_cache_dtype") or "auto", () if is_latent else FP8_CACHES
    if getattr(impl_args.get("attn_type"), "value", impl_args.get("attn_type")) not in (None, "decoder"):
        return f"attention of type {impl_args['attn_type']}"
    if impl_args.get("alibi_slopes") is not None:
        return "ALiBi"
    if impl_args.get("kv_sharing_target_layer_name") is not None:
        return "it reads another layer's cache"
    if cache not in ("auto", str(dtype).removeprefix("torch."), *caches):
        return f"a cache of {cache}"
    return f"{unknown[0]}, which flexmask does not know" if unknown else None


def bound_arguments(function: Any, *arguments: Any, **options: Any) -> dict[str, Any]:
    """The arguments of a call by name; those that flexmask does not know are left out if they have their default."""
    parameters = inspect.signature(function).parameters
    bound: dict[str, Any] = {}
    for name, value in inspect.signature(function).bind(*arguments, **options).arguments.items():
        bound |= value if parameters[name].kind is inspect.Parameter.VAR_KEYWORD else {name: value}
    defaults = {name: parameter.default for name, parameter in parameters.items()}
    known = LATENT_ARGUMENTS if "kv_lora_rank" in bound else ARGUMENTS
    return {name: value for name, value in bound.items() if name in known or not _same(value, defaults.get(name))}


def _same(value: Any, default: Any) -> bool:
    return value is default or (not isinstance(value, Tensor) and bool(value == default))
