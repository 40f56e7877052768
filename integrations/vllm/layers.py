"""An attention layer of vLLM by its name and the arguments of its implementation: its shape, or why it runs stock."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from flexmask.integrations.serving.layers import LayerShape
from flexmask.integrations.vllm.pages import FP8_CACHES

# served arguments of an attention implementation
ARGUMENTS = {
    "num_heads", "head_size", "scale", "num_kv_heads", "alibi_slopes", "sliding_window", "kv_cache_dtype", "logits_soft_cap",
    "attn_type", "kv_sharing_target_layer_name", "sinks",
}  # fmt: skip
# and of multi-head latent attention
LATENT_ARGUMENTS = {
    *ARGUMENTS, "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "qk_head_dim", "v_head_dim", "kv_b_proj",
}  # fmt: skip


def layer_number(name: str) -> int | None:
    """3 for ``model.layers.3.self_attn.attn``; None unless the name holds one number."""
    numbers = [int(part) for part in name.split(".") if part.isdigit()]
    return numbers[0] if len(numbers) == 1 else None


def shape_of(given: Mapping[str, Any]) -> LayerShape:
    """Of a layer on one rank, by the arguments of vLLM's implementation."""
    num_heads, is_latent = given["num_heads"], "kv_lora_rank" in given
    return LayerShape(
        num_heads=num_heads,
        num_kv_heads=num_heads if is_latent else given.get("num_kv_heads") or num_heads,
        head_dim=given["qk_head_dim" if is_latent else "head_size"],
        v_head_dim=given["v_head_dim" if is_latent else "head_size"],
        scale=float(given["scale"]),
        softcap=given.get("logits_soft_cap") or None,
        window=given.get("sliding_window"),
        has_sinks=given.get("sinks") is not None,
    )


def layer_reason(given: Mapping[str, Any], dtype: torch.dtype) -> str | None:
    """Give the reason if a layer runs stock in every step, by the arguments of vLLM's implementation."""
    is_latent = "kv_lora_rank" in given
    unknown = [name for name in given if name not in (LATENT_ARGUMENTS if is_latent else ARGUMENTS)]
    cache, caches = given.get("kv_cache_dtype") or "auto", () if is_latent else FP8_CACHES
    if getattr(given.get("attn_type"), "value", given.get("attn_type")) not in (None, "decoder"):
        return f"attention of type {given['attn_type']}"
    if given.get("alibi_slopes") is not None:
        return "ALiBi"
    if given.get("kv_sharing_target_layer_name") is not None:
        return "it reads another layer's cache"
    if cache not in ("auto", str(dtype).removeprefix("torch."), *caches):
        return f"a cache of {cache}"
    return f"{unknown[0]}, which flexmask does not know" if unknown else None


def given_arguments(function: Any, *arguments: Any, **options: Any) -> dict[str, Any]:
    """The arguments of a call by name, without unknown ones that have their default."""
    parameters = inspect.signature(function).parameters
    given: dict[str, Any] = {}
    for name, value in inspect.signature(function).bind(*arguments, **options).arguments.items():
        given |= value if parameters[name].kind is inspect.Parameter.VAR_KEYWORD else {name: value}
    defaults = {name: parameter.default for name, parameter in parameters.items()}
    known = LATENT_ARGUMENTS if "kv_lora_rank" in given else ARGUMENTS
    return {name: x for name, x in given.items() if name in known or not _same(x, defaults.get(name))}


def _same(value: Any, default: Any) -> bool:
    return value is default or (not isinstance(value, Tensor) and bool(value == default))
