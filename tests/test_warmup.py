"""warmup compiles what later calls need."""

import functools
import logging

import pytest
import torch
from torch._dynamo.utils import counters

from flexmask import warmup
from flexmask._torch import CPU_TAKES_UNBACKED_SIZES
from flexmask.block_masks import published_mask
from tests.attention_calls import flexprefill_attention


def call(length, device, chunked, padded, **options):
    query, key, value = (torch.randn(1, h, length, 32, device=device) for h in (4, 2, 2))
    query = query[:, :, length // 3 :].contiguous() if chunked else query
    mask = torch.arange(length, device=device)[None] >= 5 if padded else None
    with torch.no_grad():
        return flexprefill_attention(query, key, value, attention_mask=mask, dense_below=0, **options)


@pytest.mark.attention
@pytest.mark.parametrize(("chunked", "padded"), [(False, False), (True, True)])
def test_no_call_compiles_after_it(device, chunked, padded, caplog, request):
    if padded and device.type == "cpu" and not CPU_TAKES_UNBACKED_SIZES:
        request.applymarker(pytest.mark.xfail(reason="this torch writes C++ that does not compile: flexmask._torch"))
    options = {"block_size": 64, "min_budget": 64, "scale": 0.17 + chunked}
    given = {"chunked": chunked, "padded": padded, "method": "flexprefill", "gamma": 0.7, **options}
    with caplog.at_level(logging.WARNING, logger="flexmask"):
        warmup(4, 2, 32, dtype=torch.float32, device=device, **given)
    assert any("compiling" in record.message for record in caplog.records)
    caplog.clear()
    before = counters["stats"]["unique_graphs"]
    # on CUDA the last ones have maps that are not small
    for length in (1000, 333, 2048, 777, *((12000, 30000) if device.type == "cuda" else ())):
        call(length, device, chunked, padded, gamma=0.8, **options)
    assert counters["stats"]["unique_graphs"] == before
    assert not caplog.records


@pytest.mark.attention
@pytest.mark.parametrize(
    "method", ["published", published_mask, functools.partial(published_mask, tau=0.2)], ids=["name", "function", "partial"]
)
def test_published_selection_is_warmed_up_with_whole_blocks(without_kernel, method):
    # it refuses other lengths
    warmup(2, 2, 16, dtype=torch.float32, device="cpu", block_size=64, method=method)
    called = len(without_kernel)
    warmup(2, 2, 16, dtype=torch.float32, device="cpu", method=method)
    assert 0 < called < len(without_kernel)
    assert {q_len % 64 for _, _, q_len, _ in without_kernel[:called]} == {0}
    assert {q_len % 128 for _, _, q_len, _ in without_kernel[called:]} == {0}


@pytest.mark.parametrize("name", ["attention_mask", "q_offset", "return_stats"])
def test_what_it_does_not_take_is_refused(name):
    with pytest.raises(TypeError, match=f"{name} is not an option of warmup"):
        warmup(1, 1, 16, dtype=torch.float32, device="cpu", **{name: None})
