"""Shared by the tests of the adapter for transformers."""

from typing import Any

import pytest
import torch

import flexmask.integrations.huggingface as flexmask_hf
from tests.integrations.families import FAMILIES

# one shape: each further one costs a compilation
BATCH, LENGTH = 2, 530
KEEP_ALL: dict[str, Any] = {"method": "flexprefill", "gamma": 1.0, "block_size": 32, "min_budget": 0, "dense_below": 0}
SPARSE: dict[str, Any] = {"method": "flexprefill", "gamma": 0.6, "tau": 0.12, "block_size": 32, "min_budget": 0, "dense_below": 0}


def make_model(family="Llama", seed=0, **options):
    return FAMILIES[family].make(seed, **options)


def padded(tokens, number=70):
    mask = torch.ones_like(tokens)
    mask[1, :number] = 0
    return mask


def switchable(model):
    """The model, or a skip where this release does not let it change its attention."""
    try:
        with flexmask_hf.sparse_prefill(model):
            return model
    except ValueError as error:
        if "must go through transformers' attention interface" not in str(error):
            raise
        pytest.skip(f"{type(model).__name__} cannot change its attention in this release")
