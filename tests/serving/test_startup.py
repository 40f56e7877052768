"""Work before the first request: sizes of the calls that compile everything, and the largest call."""

import pytest
import torch
from torch._dynamo.utils import counters as dynamo_counters

from flexmask.integrations.serving.startup import (
    call_of_size,
    grouped_sizes,
    heads_per_mask,
    peak_memory_of,
    reserve,
    warm_sizes,
    warm_up,
)
from tests.serving.layers import CPU, SPARSE, sparse_role

# masks of all heads do not fit from some hundred tokens on
FEW_HEADS = {"block_size": 32, "max_mask_bytes": 400_000}


def test_sizes_of_the_warm_up():
    # FlexAttention's main kernel needs more rows than a block of 64
    short = [size for size in warm_sizes(sparse_role(block_size=64), (4096, 8192), CPU) if size[0] < 128]
    assert short == [(64, 1100), (127, 1100)]
    assert (127, 127) in warm_sizes(sparse_role(block_size=64, dense_below=100), (4096, 8192), CPU)
    assert min(warm_sizes(sparse_role(), (4096, 8192), CPU)) == (128, 1100)
    assert grouped_sizes(sparse_role(), (4096, 8192), CPU) == []


@pytest.mark.parametrize("largest", [(2048, 2048), (512, 2048), (64, 2048)])
def test_every_number_of_heads_that_goes_together_is_warmed_up_twice(largest):
    role = sparse_role(**FEW_HEADS)
    sizes = grouped_sizes(role, largest, CPU)
    found = [(heads_per_mask(role, size, CPU), size[0] == size[1]) for size in sizes]
    reached = set()
    for tokens in range(160, largest[1] + 1, 32):
        for size in ((tokens, tokens), (min(largest[0], tokens - 64), tokens)):
            heads = heads_per_mask(role, size, CPU)
            if size[0] <= largest[0] and heads < 4:
                reached.add((heads, size[0] == size[1]))
    assert len(reached) >= 2
    for kind in reached:
        assert found.count(kind) >= 2
        first, second = (size for size, same in zip(sizes, found, strict=True) if same == kind)
        assert first[0] != second[0]
        assert first[1] != second[1]


@pytest.mark.attention
@pytest.mark.slow
def test_calls_whose_heads_go_in_groups_compile_nothing_after_the_warm_up():
    role, largest = sparse_role(**{**SPARSE, **FEW_HEADS}), (1024, 1024)
    with torch.inference_mode():
        warm_up([role], largest, CPU, torch.float32, True)
        for size in grouped_sizes(role, largest, CPU):
            call_of_size(role, size, CPU, torch.float32, ("density",))
        compiled = dynamo_counters["stats"]["unique_graphs"]
        for size in ((1024, 1024), (800, 1024), (900, 900)):
            assert heads_per_mask(role, size, CPU) < 4
            call_of_size(role, size, CPU, torch.float32, ("density",))
    assert dynamo_counters["stats"]["unique_graphs"] == compiled


@pytest.mark.gpu
@pytest.mark.attention
def test_the_largest_call_needs_its_keys_twice_and_more():
    device, size = torch.device("cuda"), (512, 4096)
    role = sparse_role(**SPARSE)
    with torch.inference_mode():
        warm_up([role], size, device, torch.bfloat16, True)
        before = torch.cuda.memory_allocated(device)
        needed = peak_memory_of(lambda: reserve([role], size, device, torch.bfloat16, True), device)
    keys_and_values = 2 * 2 * size[1] * 2 * 32
    assert needed > 2 * keys_and_values
    assert torch.cuda.memory_allocated(device) == before
