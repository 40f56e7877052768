"""One request's chunk: the core's own attention in the engine's layout, at any length."""

from __future__ import annotations

import pytest
import torch

from flexmask import flexprefill_attention, sparse_attention
from flexmask.integrations.settings import PrefillSettings
from flexmask.integrations.vllm.attend import attend
from flexmask.integrations.vllm.counters import Counters
from flexmask.integrations.vllm.layers import sparse_layer
from flexmask.integrations.vllm.plan import plan_step
from flexmask.integrations.vllm.startup import warm_up

GIVEN = {"num_heads": 4, "head_size": 32, "scale": 0.2, "num_kv_heads": 2}
OPTIONS = {"gamma": 0.7, "block_size": 32, "min_budget": 0}
METHOD = {"method": "streaming_llm", "method_options": {"window_blocks": 2}, "block_size": 32}


@pytest.mark.attention
def test_calls_after_the_warm_up_are_the_core_s_and_compile_nothing():
    from torch._dynamo.utils import counters

    # lengths far below dense_below, which the plan of a step looks at
    layer = sparse_layer(0, GIVEN, PrefillSettings.from_options(**OPTIONS), 0, 1)
    with torch.inference_mode():
        assert warm_up([layer, layer], (600, 2000), torch.device("cpu"), torch.float32, True) > 0
        compiled = counters["stats"]["unique_graphs"]
        for rows in (150, 420):
            query, key, value = torch.randn(rows, 4, 32), torch.randn(2, 420, 32), torch.randn(2, 420, 32)
            batch = (query.transpose(0, 1).contiguous()[None], key[None], value[None])

            out, density = attend(layer, query, key, value, count_density=True)
            expected, stats = flexprefill_attention(*batch, scale=0.2, dense_below=0, return_stats=True, **OPTIONS)
            torch.testing.assert_close(out.transpose(0, 1), expected[0])
            torch.testing.assert_close(density, stats.density.mean())
            assert density < 0.9
    assert counters["stats"]["unique_graphs"] == compiled


@pytest.mark.attention
@pytest.mark.slow
def test_a_method_of_the_gallery_serves_too():
    layer = sparse_layer(0, GIVEN, PrefillSettings.from_options(**METHOD), 0, 1)
    query, key, value = torch.randn(150, 4, 32), torch.randn(2, 420, 32), torch.randn(2, 420, 32)
    out, density = attend(layer, query, key, value, count_density=True)
    batch = (query.transpose(0, 1).contiguous()[None], key[None], value[None])
    expected = sparse_attention(*batch, "streaming_llm", block_size=32, scale=0.2, dense_below=0, window_blocks=2)
    torch.testing.assert_close(out.transpose(0, 1), expected[0])
    assert density is None


def test_counters_weigh_densities_by_rows():
    counters = Counters()
    assert counters.density is None
    assert not counters.due(60)
    assert counters.due(0)
    assert "mean density none" in counters.report()
    counters.add_step(plan_step([0, 100, 140, 141], [100, 40, 90], least_rows=64, dense_below=0))
    counters.add_density(torch.tensor(0.5), 100)
    counters.add_density(torch.tensor(0.2), 200)
    assert counters.density == pytest.approx(0.3)
    assert counters.report() == "flexmask served 100 prefill tokens sparse in 1 steps, 40 dense; mean density 0.300"
