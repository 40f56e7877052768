"""Number of query heads of each layer of a model, by its config."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def heads_by_layer(config: Any, module_heads: Mapping[int, int]) -> tuple[int | None, ...] | None:
    """Number of query heads of each layer, None where it is unknown; None if the config has no number of layers.

    `module_heads` has the heads of a model's modules by layer. They override the config's, from which some models differ.
    """
    num_layers = getattr(config, "num_hidden_layers", None)
    if not isinstance(num_layers, int):
        return None
    # a config whose layers differ in a value refuses to be asked for it; its layers' configs answer
    layer_configs = config.per_layer_config if getattr(config, "is_heterogeneous", False) else [config] * num_layers
    heads = getattr(config, "num_attention_heads_per_layer", None)
    heads = heads or [getattr(layer_config, "num_attention_heads", None) for layer_config in layer_configs]
    heads = [each[layer] if isinstance(each, (list, tuple)) else each for layer, each in enumerate(heads)]
    return tuple(module_heads.get(layer, heads[layer]) for layer in range(num_layers))
