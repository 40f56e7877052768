"""Refusals of the oracle."""

from typing import Any

import pytest
import torch

from tests.oracle.by_hand import BLOCK, random_inputs
from tests.oracle.flexprefill import reference_flexprefill


@pytest.mark.parametrize(
    "options",
    [
        {"softcap": 10.0},
        {"window": 64},
        {"attention_mask": torch.ones(1, 64)},
        {"pattern_queries": "middle"},
        {"index_queries": "middle"},
        {"query_aware": "per_query"},
        {"q_offset": torch.tensor(0)},
        {"block_size": 48},
    ],
    ids=lambda options: next(iter(options)),
)
def test_published_refuses_what_it_cannot_do(options):
    query, key = random_inputs(0, 64, 64)
    with pytest.raises(ValueError, match="published"):
        reference_flexprefill(query, key, method="published", **{"block_size": BLOCK, **options})


def test_published_refuses_chunks():
    query, key = random_inputs(0, 32, 64)
    with pytest.raises(ValueError, match="q_len == kv_len"):
        reference_flexprefill(query, key, method="published", block_size=BLOCK)


@pytest.mark.parametrize("name", ["method", "query_aware", "pattern_queries", "index_queries"])
def test_unknown_words(name):
    query, key = random_inputs(0, 32, 32)
    options: dict[str, Any] = {name: "nothing"}
    with pytest.raises(ValueError, match=name):
        reference_flexprefill(query, key, **options)
