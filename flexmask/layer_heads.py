"""Query heads of each layer of a model, by its config."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

# query heads by layer as a model's modules have them, by id of a living config: some models differ from theirs
_HEADS: dict[int, Mapping[int, int]] = {}


def note_heads(config: Any, heads: Mapping[int, int]) -> None:
    """Query heads by layer of a model of this config, for `heads_by_layer`."""
    if id(config) not in _HEADS:
        weakref.finalize(config, _HEADS.pop, id(config), None)
    _HEADS[id(config)] = heads


def heads_by_layer(config: Any) -> tuple[int | None, ...] | None:
    """Query heads of each layer, noted ones or those of the config, None where neither knows; None without a number of layers."""
    number = getattr(config, "num_hidden_layers", None)
    if not isinstance(number, int):
        return None
    # a config whose layers differ in a value refuses to be asked for it; its layers' configs answer
    layers = config.per_layer_config if getattr(config, "is_heterogeneous", False) else [config] * number
    heads = getattr(config, "num_attention_heads_per_layer", None)
    heads = heads or [getattr(of_layer, "num_attention_heads", None) for of_layer in layers]
    heads = [each[layer] if isinstance(each, (list, tuple)) else each for layer, each in enumerate(heads)]
    noted = _HEADS.get(id(config), {})
    return tuple(noted.get(layer, heads[layer]) for layer in range(number))
