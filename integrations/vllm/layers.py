"""The role of one of vLLM's attention layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from flexmask.integrations.serving.layers import LayerShape, SparseLayer, role_of_shape
from flexmask.integrations.vllm.pages import FP8_CACHES
from flexmask.settings import PrefillSettings

# served arguments of an attention implementation
_KNOWN = {"num_heads", "head_size", "scale", "num_kv_heads", "alibi_slopes", "sliding_window", "kv_cache_dtype"}
_KNOWN |= {"logits_soft_cap", "attn_type", "kv_sharing_target_layer_name", "sinks"}
# multi-head latent attention
_LATENT = {"q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "qk_head_dim", "v_head_dim", "kv_b_proj"}


def layer_number(name: str) -> int | None:
    """3 for ``model.layers.3.self_attn.attn``; None unless the name holds one number."""
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
    """The role of a layer on one rank, by the arguments `given` to vLLM's implementation and its defaults. As `role_of_shape`."""
    reason = _reason_by_arguments(given, defaults, dtype)
    if number is None or reason is not None:
        return reason or "no layer number in its name"
    num_heads, is_latent = given["num_heads"], "kv_lora_rank" in given
    shape = LayerShape(
        num_heads=num_heads,
        num_kv_heads=num_heads if is_latent else given.get("num_kv_heads") or num_heads,
        head_dim=given["qk_head_dim" if is_latent else "head_size"],
        v_head_dim=given["v_head_dim" if is_latent else "head_size"],
        scale=float(given["scale"]),
        softcap=given.get("logits_soft_cap") or None,
        window=given.get("sliding_window"),
        has_sinks=given.get("sinks") is not None,
    )
    return role_of_shape(shape, number, settings, rank, ranks)


def _reason_by_arguments(given: Mapping[str, Any], defaults: Mapping[str, Any], dtype: torch.dtype) -> str | None:
    is_latent = "kv_lora_rank" in given
    served = _KNOWN | _LATENT if is_latent else _KNOWN
    unknown = [name for name, value in given.items() if name not in served and not _same(value, defaults.get(name))]
    cache, caches = given.get("kv_cache_dtype") or "auto", () if is_latent else FP8_CACHES
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
    return None


def _same(value: Any, default: Any) -> bool:
    return value is default or (not isinstance(value, Tensor) and value == default)
