"""Roles of layers: sparse with this rank's options, or stock for a reason."""

from enum import Enum
from typing import Any

import pytest
import torch

from flexmask.integrations.serving.layers import SparseLayer, Stock, role_of_shape
from flexmask.integrations.vllm.layers import layer_index, layer_reason, shape_of
from flexmask.settings import PrefillSettings

Kind = Enum("Kind", {"ENCODER": "encoder", "DECODER": "decoder"}, type=str)
GIVEN = {"num_heads": 4, "head_size": 64, "scale": 0.125, "num_kv_heads": 2, "attn_type": Kind.DECODER}


def role(number=1, settings=None, dtype=torch.bfloat16, ranks=(0, 1), **given):
    given = {**GIVEN, **given}
    reason = layer_reason(given, dtype)
    return Stock(reason) if reason else role_of_shape(shape_of(given), number, settings or PrefillSettings(), *ranks)


def test_number_of_a_layer_by_its_name():
    numbers = {"model.layers.3.self_attn.attn": 3, "transformer.h.11.attn": 11, "attn": None, "a.1.b.2.attn": None}
    assert {name: layer_index(name) for name in numbers} == numbers


LATENT: dict[str, Any] = {"head_size": 576, "num_kv_heads": 1, "q_lora_rank": None, "kv_lora_rank": 512, "qk_nope_head_dim": 128}
LATENT |= {"qk_rope_head_dim": 64, "qk_head_dim": 192, "v_head_dim": 128, "kv_b_proj": torch.nn.Identity()}


def test_latent_attention_is_served_as_the_plain_attention_that_it_becomes():
    layer = role(**LATENT)
    assert isinstance(layer, SparseLayer)
    assert (layer.num_kv_heads, layer.head_dim, layer.v_head_dim) == (4, 192, 128)
    assert role(**LATENT, kv_cache_dtype="fp8") == Stock("a cache of fp8")
    assert role(**LATENT, indexer=torch.nn.Identity()) == Stock("indexer, which flexmask does not know")


SERVED = [
    *({}, {"attn_type": "decoder"}, {"logits_soft_cap": 50.0}, {"sinks": torch.zeros(4)}),
    *({"kv_cache_dtype": cache} for cache in ("bfloat16", "fp8", "fp8_e5m2")),
    *({"sliding_window": 20000}, {"head_size": 512}),
    # gamma 1 keeps every block of some prompts or heads only
    {"settings": PrefillSettings(gamma=1.0, dense_below=0)},
    {"settings": PrefillSettings("flexprefill", gamma=1.0, max_budget=2048)},
    {"settings": PrefillSettings(gamma=[1.0, 1.0, 1.0, 0.9])},
]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        *((given, None) for given in SERVED),
        ({"alibi_slopes": [1.0]}, "ALiBi"),
        ({"kv_cache_dtype": "fp8_per_token_head"}, "a cache of fp8_per_token_head"),
        ({"kv_cache_dtype": "float16"}, "a cache of float16"),
        ({"attn_type": Kind.ENCODER}, "attention of type"),
        ({"kv_sharing_target_layer_name": "model.layers.0"}, "another layer's cache"),
        ({"sliding_window": 4096}, "sliding window 4096 < dense_below 16384"),
        ({"head_size": 640}, "head_dim 640 outside 16 to 512"),
        ({"chunk_lookback": 2}, "chunk_lookback, which flexmask does not know"),
        ({"something_new": torch.zeros(1)}, "something_new"),
        ({"settings": PrefillSettings(dense_layers=(1,))}, "in dense_layers"),
        ({"settings": PrefillSettings(gamma=1.0)}, "every head keeps every block"),
        ({"settings": PrefillSettings(layers={1: {"gamma": [1.0] * 4}})}, "every head keeps every block"),
    ],
)
def test_layers_are_served_or_say_why_they_stay_stock(given, message):
    found = role(**given)
    assert isinstance(found, SparseLayer) if message is None else message in found.reason


def test_a_method_that_takes_no_chunks_is_refused():
    with pytest.raises(ValueError, match="published"):
        role(settings=PrefillSettings(method="published"))


def test_each_rank_gets_the_numbers_of_its_heads():
    shares = PrefillSettings(gamma=[0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8])
    assert role(settings=shares, ranks=(0, 2)).method.options["gamma"] == (0.1, 0.2, 0.3, 0.4)
    assert role(settings=shares, ranks=(1, 2)).method.options["gamma"] == (0.5, 0.6, 0.7, 0.8)
    with pytest.raises(ValueError, match="layer 1: gamma must hold one number for each of query's 4 heads; got 8 numbers"):
        role(settings=shares)
    of_layer = PrefillSettings(layers={1: {"gamma": [0.9, 1.0] * 4}})
    assert role(settings=of_layer, ranks=(1, 2)).method.options["gamma"] == (0.9, 1.0, 0.9, 1.0)
    one = PrefillSettings(gamma=0.7)
    assert role(settings=one, ranks=(1, 2)).method.options["gamma"] == 0.7
    pairs = PrefillSettings(method="minference", plan=[[number, 100] for number in range(1, 9)])
    assert role(settings=pairs, ranks=(1, 2)).method.options["plan"] == tuple((number, 100) for number in range(5, 9))
    # a method's own plan is the whole model's
    whole = role(settings=PrefillSettings(method="moa"), num_heads=8).method.options["plan"]
    halves = [role(settings=PrefillSettings(method="moa"), ranks=(rank, 2)).method.options["plan"] for rank in range(2)]
    assert halves[0] + halves[1] == whole


def test_variants_differ_in_what_is_compiled_and_not_in_numbers():
    options = {
        "method": "flexprefill",
        "gamma": 0.9,
        "layers": {1: {"gamma": 0.5, "tau": 0.2}, 2: {"tau": 0.0}, 3: {"min_budget": 7}},
    }
    variants = [role(number, PrefillSettings(**options)).variant for number in range(4)]
    capped = role(0, PrefillSettings(**options), logits_soft_cap=30.0).variant
    assert variants[0] == variants[1]
    assert len({*variants, capped}) == 4
