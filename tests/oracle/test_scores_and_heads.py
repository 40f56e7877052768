"""The oracle's scores under scale and soft cap, and grouped-query heads."""

import math
from typing import Any

import pytest
import torch

from tests.comparisons import same_values
from tests.oracle.by_hand import BLOCK, decide, random_inputs
from tests.oracle.reference import reference
from tests.oracle.result import ReferenceResult


def test_scale_and_softcap_shape_the_scores():
    scores = torch.zeros(1, 32)
    scores[0, 0] = 2.0
    result = decide(scores, scale=3.0, softcap=5.0)
    weight = math.exp(5 * math.tanh(6 / 5))
    assert result.vertical[0, 0, 0].item() == pytest.approx((weight + 15) / (weight + 31))
    # The pooled score is capped after the mean: 3 * 2 / 16.
    weight = math.exp(5 * math.tanh(6 / 16 / 5))
    assert result.pooled[0, 0, 0, 0].item() == pytest.approx(weight / (weight + 1))


def test_heads_share_keys_in_groups():
    query, key = random_inputs(11, 64, 64, num_heads=4, num_kv_heads=2)
    options: dict[str, Any] = {"gamma": 0.5, "tau": 0.3, "block_size": BLOCK, "min_budget": 0}
    grouped = reference(query, key, **options)
    expanded = reference(query, key.repeat_interleave(2, 1), **options)
    for name in ReferenceResult.__dataclass_fields__:
        assert same_values(getattr(grouped, name), getattr(expanded, name)), name
    assert not torch.equal(grouped.vertical[0, 1], grouped.vertical[0, 2])
