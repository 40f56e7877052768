"""sparse_attention on a GPU, with log-sum-exp, and captured in a CUDA graph; tests/test_attention.py has its gradients."""

import pytest
import torch

from flexmask import flexprefill_mask
from flexmask.compilation import _compile
from flexmask.flex.backend import flash_available
from tests.attention_calls import call, check, flexprefill_attention, padding
from tests.cases import structured_inputs
from tests.comparisons import assert_same_attention
from tests.compile_support import assert_same_lists

pytestmark = [pytest.mark.attention, pytest.mark.gpu]

PADDED = {"batch": 2, "attention_mask": padding(1500, ("left", 300), ("right", 100))}
PADDED_WINDOW = {**PADDED, "q_len": 1500, "block_size": 128, "dtype": torch.float16, "scores": {"window": 800}}
_HALF = {"block_size": 128, "dtype": torch.bfloat16, "heads": (8, 2)}
_WIDE = {"q_len": 1500, "block_size": 128, "dtype": torch.bfloat16, "heads": (4, 2)}
GPU_VARIANTS = {
    "float32": {"q_len": 700, "block_size": 64, "head_dims": (64, 64)},
    "float32, small blocks": {"q_len": 333, "block_size": 16},
    "odd blocks, chunk": {"q_len": 300, "kv_len": 500, "block_size": 48, "scores": {"softcap": 5.0}},
    "bfloat16": {**_HALF, "q_len": 2048, "head_dims": (128, 128)},
    "bfloat16, ragged chunk": {**_HALF, "q_len": 900, "kv_len": 2500, "head_dims": (64, 64)},
    "float16, padded, window": {**PADDED_WINDOW, "head_dims": (64, 64)},
    # tiles of our own
    **{f"bfloat16, {d}": {**_WIDE, "head_dims": d} for d in ((96, 96), (192, 128), (160, 160), (256, 256), (512, 512))},
    "bfloat16, 256, soft cap": {**_WIDE, "head_dims": (256, 256), "scores": {"softcap": 5.0}},
    "float16, 256, padded, window": {**PADDED_WINDOW, "head_dims": (256, 256)},
    "float32, 512": {"q_len": 700, "block_size": 64, "head_dims": (512, 512)},
    "float16, 512, blocks of 64": {"q_len": 700, "block_size": 64, "head_dims": (512, 512), "dtype": torch.float16},
}
FLASH = pytest.mark.skipif(not flash_available(), reason="flash-attn-4 is not installed")
ON_FLASH = ("bfloat16", "bfloat16, ragged chunk", "float16, padded, window")


@pytest.mark.parametrize(
    ("backend", "name"),
    [*(("triton", name) for name in GPU_VARIANTS), *(pytest.param("flash", name, marks=FLASH) for name in ON_FLASH)],
)
def test_is_dense_attention_under_the_mask_on_cuda(cuda, backend, name):
    check(call(**GPU_VARIANTS[name]), cuda, backend=backend)


def test_a_cached_graph_serves_its_own_block_size(cuda):
    """Calls in another order leave graphs in the cache on disk; with symbolic block sizes (torch 2.11) a wrong one could run."""
    given = {"q_len": 1500, "head_dims": (64, 64), "dtype": torch.bfloat16, "gamma": 0.3, "scores": {"window": 500}, **PADDED}
    for sizes in ((128, 64, 48), (128, 48, 64)):
        torch.compiler.reset()
        _compile.cache_clear()
        for block_size in sizes:
            check(call(block_size=block_size, **given), cuda, backend="triton")


def test_log_sum_exp_is_that_of_kept_scores(cuda):
    case = call(q_len=700, block_size=64, head_dims=(64, 64), batch=2, attention_mask=padding(700, ("left", 100), ("left", 0)))
    out, lse = case.attend(cuda, return_lse=True, backend="triton")
    expected, wanted = case.under(case.to(cuda).select().keep)
    assert_same_attention(out, expected)
    assert lse.dtype == torch.float32
    torch.testing.assert_close(lse.cpu().double(), wanted, atol=1e-4, rtol=1e-4)
    assert (lse[0, :, :100] == float("-inf")).all()


OPTIONS = {"gamma": 0.8, "tau": 0.2, "block_size": 64, "min_budget": 64}


def tensors(seed, device):
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


def test_a_cuda_graph_replays_on_new_inputs(cuda):
    query, key, value = tensors(0, cuda)
    graph, out = captured(lambda: flexprefill_attention(query, key, value, dense_below=0, backend="triton", **OPTIONS))
    lists_graph, mask = captured(lambda: flexprefill_mask(query, key, **OPTIONS))
    kept = set()
    for seed in (1, 2, 3):
        fresh = tensors(seed, cuda)
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
