"""Query heads of each layer of a model, by its config."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def heads_by_layer(config: Any, of_modules: Mapping[int, int]) -> tuple[int | None, ...] | None:
    """Query heads of each layer, None where nothing tells; None without a number of layers.

    `of_modules`, by layer, are those of a model's modules: some models differ from their configs.
    """
    number = getattr(config, "num_hidden_layers", None)
    if not isinstance(number, int):
        return None
    # a config whose layers differ in a value refuses to be asked for it; its layers' configs answer
    layers = config.per_layer_config if getattr(config, "is_heterogeneous", False) else [config] * number
    heads = getattr(config, "num_attention_heads_per_layer", None)
    heads = heads or [getattr(of_layer, "num_attention_heads", None) for of_layer in layers]
    heads = [each[layer] if isinstance(each, (list, tuple)) else each for layer, each in enumerate(heads)]
    return tuple(of_modules.get(layer, heads[layer]) for layer in range(number))
