"""Shared by the tests of the adapter for transformers."""

from typing import Any

import pytest
import torch
import transformers
from transformers import DynamicCache, StaticCache

import flexmask.integrations.huggingface as flexmask_hf
from flexmask.integrations.huggingface.scope import open_scopes
from tests.integrations.families import FAMILIES

RELEASE = tuple(int(number) for number in transformers.__version__.split(".")[:2])
# one shape: each further one costs a compilation
BATCH, LENGTH = 2, 530
KEEP_ALL: dict[str, Any] = {"method": "flexprefill", "gamma": 1.0, "block_size": 32, "min_budget": 0, "dense_below": 0}
SPARSE: dict[str, Any] = {"method": "flexprefill", "gamma": 0.6, "tau": 0.12, "block_size": 32, "min_budget": 0, "dense_below": 0}


def make_model(family="Llama", seed=0, **options):
    return FAMILIES[family].make(seed, **options)


def made(name, config, **options):
    """A model of a class of transformers, or a skip where this release lacks it."""
    if not hasattr(transformers, name):
        pytest.skip(f"this release has no {name}")
    return getattr(transformers, name)(getattr(transformers, config)(**options)).eval()


def static_cache(model, length):
    sizes = {"max_batch_size": BATCH, "dtype": torch.float32, "device": "cpu"} if RELEASE < (4, 56) else {}
    return StaticCache(config=model.config, max_cache_len=length, **sizes)


def dynamic_cache(model):
    return DynamicCache() if RELEASE < (4, 56) else DynamicCache(config=model.config)


def padded(tokens, number=70):
    mask = tokens.new_ones(tokens.shape)
    mask[1, :number] = 0
    return mask


def is_open(model):
    """True if a block is, in any thread."""
    assert model.config._attn_implementation in ("sdpa", "flexmask:SDPA")
    return model.config._attn_implementation != "sdpa"


def is_untouched(model, attention="sdpa"):
    return (
        model.config._attn_implementation == attention
        and not hasattr(model.config, "flexmask_config")
        and not open_scopes(model.config)
        and not any(map(open_scopes, model.modules()))
        and not model.base_model._forward_hooks
        and not model.base_model._forward_hooks_with_kwargs
    )


def switchable(model):
    """The model, or a skip where this release does not let it change its attention."""
    try:
        with flexmask_hf.sparse_prefill(model):
            return model
    except ValueError as error:
        if "must go through transformers' attention interface" not in str(error):
            raise
        pytest.skip(f"{type(model).__name__} cannot change its attention in this release")
