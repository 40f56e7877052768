"""Roles of layers: sparse with the options of this rank's heads, or the engine's own kernel for a reason."""

from __future__ import annotations

from enum import Enum
from typing import Any

import pytest
import torch

from flexmask.integrations.settings import PrefillSettings
from flexmask.integrations.vllm.layers import layer_number, reason_for_stock, sparse_layer
from flexmask.integrations.vllm.options import ServingOptions
from flexmask.integrations.vllm.startup import roles_line

Kind = Enum("Kind", {"ENCODER": "encoder", "DECODER": "decoder"}, type=str)
GIVEN: dict[str, Any] = {
    "num_heads": 4,
    "head_size": 64,
    "scale": 0.125,
    "num_kv_heads": 2,
    "alibi_slopes": None,
    "kv_cache_dtype": "auto",
}
GIVEN |= {"sliding_window": None, "logits_soft_cap": None, "attn_type": Kind.DECODER, "kv_sharing_target_layer_name": None}
DEFAULTS = {"chunk_lookback": -1, "use_alibi_sqrt": False}


def reason(number=1, settings=None, dtype=torch.bfloat16, **given):
    return reason_for_stock(number, {**GIVEN, **given}, DEFAULTS, settings or PrefillSettings(), dtype)


@pytest.mark.parametrize(
    ("name", "number"),
    [("model.layers.3.self_attn.attn", 3), ("transformer.h.11.attn", 11), ("attn", None), ("a.1.b.2.attn", None)],
)
def test_number_of_a_layer_by_its_name(name, number):
    assert layer_number(name) == number


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"attn_type": "decoder"},
        {"kv_cache_dtype": "bfloat16"},
        {"chunk_lookback": -1},
        {"logits_soft_cap": 50.0},
        {"sinks": torch.zeros(4)},
        {"sliding_window": 20000},
    ],
)
def test_layers_that_are_served(given):
    assert reason(**given) is None


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"alibi_slopes": [1.0]}, "ALiBi"),
        ({"kv_cache_dtype": "fp8_e4m3"}, "a cache of fp8_e4m3"),
        ({"kv_cache_dtype": "float16"}, "a cache of float16"),
        ({"attn_type": Kind.ENCODER}, "attention of type"),
        ({"kv_sharing_target_layer_name": "model.layers.0"}, "another layer's cache"),
        ({"sliding_window": 4096}, "sliding window 4096 < dense_below 16384"),
        ({"head_size": 512}, "head_dim 512"),
        ({"chunk_lookback": 2}, "chunk_lookback, which flexmask does not know"),
        ({"something_new": torch.zeros(1)}, "something_new"),
        ({"number": None}, "no layer number"),
        ({"settings": PrefillSettings(dense_layers=(1,))}, "in dense_layers"),
        ({"settings": PrefillSettings.from_options(gamma=1.0)}, "gamma 1 in every head"),
        ({"settings": PrefillSettings.from_options(layers={1: {"gamma": [1.0, 1.0]}})}, "gamma 1 in every head"),
    ],
)
def test_layers_that_stay_stock_say_why(given, message):
    found = reason(**given)
    assert found is not None
    assert message in found


@pytest.mark.parametrize("options", [{"gamma": 1.0, "dense_below": 0}, {"gamma": 1.0, "max_budget": 2048}, {"gamma": [1.0, 0.9]}])
def test_gamma_one_is_not_always_stock(options):
    assert reason(settings=PrefillSettings.from_options(**options)) is None


def test_each_rank_gets_the_gammas_of_its_heads():
    settings = PrefillSettings.from_options(gamma=[0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8])
    assert sparse_layer(0, GIVEN, settings, 0, 2).config.gamma == (0.1, 0.2, 0.3, 0.4)
    assert sparse_layer(0, GIVEN, settings, 1, 2).config.gamma == (0.5, 0.6, 0.7, 0.8)
    with pytest.raises(ValueError, match="one number a head, 4 in layer 0; got 8"):
        sparse_layer(0, GIVEN, settings, 0, 1)


def test_variants_differ_in_what_is_compiled_and_not_in_gamma():
    settings = PrefillSettings.from_options(gamma=0.9, layers={1: {"gamma": 0.5, "tau": 0.2}, 2: {"block_size": 64}})
    first, second, third = (sparse_layer(number, GIVEN, settings, 0, 1).variant for number in range(3))
    capped = sparse_layer(0, {**GIVEN, "logits_soft_cap": 30.0}, settings, 0, 1).variant
    assert first == second
    assert len({first, third, capped}) == 3


def test_line_at_start_up():
    settings = PrefillSettings.from_options(gamma=0.9, layers={1: {"gamma": 0.95}}, selection="hybrid")
    layers = {str(number): sparse_layer(number, GIVEN, settings, 0, 1) for number in range(2)}
    line = roles_line({**layers, "2": "ALiBi", "3": "ALiBi"}, ServingOptions(settings, source="defaults"), "FLASH_ATTN")
    for part in (
        "2 of 4 attention layers prefill sparse (FlexPrefill, gamma 0.9 to 0.95 by layer or head, selection hybrid)",
        "from 16384 tokens on, in chunks of at least 128 rows",
        "FLASH_ATTN serves all else. Settings: defaults.",
        "2 layers (ALiBi)",
    ):
        assert part in line
    assert "0 of 1 attention layers" in roles_line({"2": "ALiBi"}, ServingOptions(settings), "FLASH_ATTN")
