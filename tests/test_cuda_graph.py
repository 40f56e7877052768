"""Mask and attention captured in a CUDA graph and replayed on new inputs."""

import pytest
import torch

from flexmask import flexprefill_mask
from tests.attention_calls import flexprefill_attention
from tests.cases import structured_inputs
from tests.compile_support import assert_same_lists

pytestmark = pytest.mark.gpu

OPTIONS = {"gamma": 0.8, "tau": 0.2, "block_size": 64, "min_budget": 64}


def inputs(seed, device):
    query, key = structured_inputs(torch.Generator().manual_seed(seed), 1, 8, 2, 1000, 1000, 64, 5.0)
    value = torch.randn(1, 2, 1000, 64, generator=torch.Generator().manual_seed(seed))
    return [x.to(device, torch.bfloat16) for x in (query, key, value)]


def captured(function):
    """The graph of a call and its result."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side), torch.no_grad():
        for _ in range(2):
            function()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        result = function()
    return graph, result


def test_replays_on_new_inputs(cuda):
    query, key, value = inputs(0, cuda)
    graph, out = captured(lambda: flexprefill_attention(query, key, value, dense_below=0, backend="triton", **OPTIONS))
    lists_graph, mask = captured(lambda: flexprefill_mask(query, key, **OPTIONS))
    kept = set()
    for seed in (1, 2, 3):
        fresh = inputs(seed, cuda)
        for old, new in zip((query, key, value), fresh, strict=True):
            old.copy_(new)
        graph.replay()
        lists_graph.replay()
        with torch.no_grad():
            expected = flexprefill_attention(*fresh, dense_below=0, backend="triton", **OPTIONS)
            plain = flexprefill_mask(*fresh[:2], **OPTIONS)
        assert torch.equal(out, expected)
        assert_same_lists(mask, plain)
        kept.add(int(plain.full_kv_num_blocks.sum()))
    assert len(kept) > 1, "the masks were all alike"
