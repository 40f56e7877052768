"""The role of one attention layer: sparse prefill with these options, or the engine's own kernel for this reason."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from flexmask.base.inputs import HEAD_DIMS
from flexmask.config import FlexPrefillConfig
from flexmask.integrations.settings import PrefillSettings

# arguments of an attention implementation that are served, or looked at by name
_KNOWN = {"num_heads", "head_size", "scale", "num_kv_heads", "alibi_slopes", "sliding_window", "kv_cache_dtype"}
_KNOWN |= {"logits_soft_cap", "attn_type", "kv_sharing_target_layer_name", "sinks"}


@dataclass(frozen=True, eq=False)
class SparseLayer:
    """A layer whose long prefills run sparse: its shape on this rank, its scores, and its options."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    softcap: float | None
    window: int | None
    has_sinks: bool
    config: FlexPrefillConfig
    settings: PrefillSettings

    @property
    def variant(self) -> tuple[Any, ...]:
        """Everything that its kernels are compiled for, gamma and tau left out."""
        config = replace(self.config, gamma=0.5, tau=0.5 if self.config.tau else 0.0)
        shape = (self.num_heads, self.num_kv_heads, self.head_dim, isinstance(self.config.gamma, tuple))
        return (*shape, self.scale, self.softcap, self.window, self.has_sinks, config)


def layer_number(name: str) -> int | None:
    """Index of the layer with a name such as ``model.layers.3.self_attn.attn``; None unless it holds one number."""
    numbers = [int(part) for part in name.split(".") if part.isdigit()]
    return numbers[0] if len(numbers) == 1 else None


def reason_for_stock(
    number: int | None, given: Mapping[str, Any], defaults: Mapping[str, Any], settings: PrefillSettings, dtype: torch.dtype
) -> str | None:
    """Reason why the engine's own kernel serves all of a layer, None where prefills may run sparse.

    Parameters
    ----------
    number
        `layer_number`, None for a layer without.
    given, defaults
        The arguments that vLLM made the implementation with, and the defaults of the others, by name.
    settings, dtype
        Of the model.
    """
    unknown = [name for name, value in given.items() if name not in _KNOWN and not _same(value, defaults.get(name))]
    cache = given.get("kv_cache_dtype") or "auto"
    window = given.get("sliding_window")
    if number is None:
        return "no layer number in its name"
    if number in settings.dense_layers:
        return "in dense_layers"
    if getattr(given.get("attn_type"), "value", given.get("attn_type")) not in (None, "decoder"):
        return f"attention of type {given['attn_type']}"
    if given.get("alibi_slopes") is not None:
        return "ALiBi"
    if given.get("kv_sharing_target_layer_name") is not None:
        return "it reads another layer's cache"
    if cache not in ("auto", str(dtype).removeprefix("torch.")):
        return f"a cache of {cache}"
    if unknown:
        return f"{unknown[0]}, which flexmask does not know"
    if given["head_size"] not in HEAD_DIMS:
        return f"head_dim {given['head_size']} outside {HEAD_DIMS[0]} to {HEAD_DIMS[-1]}"
    if window is not None and window < settings.break_even:
        return f"sliding window {window} < dense_below {settings.break_even}"
    gamma = settings.of_layer(number).gamma
    gammas = gamma if isinstance(gamma, tuple) else (gamma,)
    uncapped = settings.of_layer(number).max_budget is None
    if settings.method == "flexprefill" and settings.break_even > 0 and uncapped and all(value == 1 for value in gammas):
        return "gamma 1 in every head"
    return None


def sparse_layer(number: int, given: Mapping[str, Any], settings: PrefillSettings, rank: int, ranks: int) -> SparseLayer:
    """The options of one layer on one rank of a tensor-parallel group.

    vLLM gives the ranks equal shares of the query heads, in order, and gammas by head are shared out in the same way.

    Raises
    ------
    ValueError
        If a gamma by head is not of as many heads as the layer has on all ranks.
    """
    config = settings.of_layer(number)
    num_heads = given["num_heads"]
    if isinstance(config.gamma, tuple):
        if len(config.gamma) != num_heads * ranks:
            raise ValueError(f"gamma must hold one number a head, {num_heads * ranks} in layer {number}; got {len(config.gamma)}")
        config = replace(config, gamma=config.gamma[rank * num_heads : (rank + 1) * num_heads])
    return SparseLayer(
        num_heads=num_heads,
        num_kv_heads=given.get("num_kv_heads") or num_heads,
        head_dim=given["head_size"],
        scale=float(given["scale"]),
        softcap=given.get("logits_soft_cap") or None,
        window=given.get("sliding_window"),
        has_sinks=given.get("sinks") is not None,
        config=config,
        settings=settings,
    )


def _same(value: Any, default: Any) -> bool:
    return value is default or (not isinstance(value, Tensor) and value == default)
