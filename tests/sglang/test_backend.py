"""Steps of SGLang's own ForwardBatch, layer, pools and torch_native backend."""

import math
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("sglang", reason="`make test-sglang` has it in an environment of its own")

from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from tests.expected import rows_attention
from tests.sglang.served import DIM, HEADS, KEEP_ALL, SPARSE, STEPS, Served, ServedMixture, outputs

pytestmark = pytest.mark.usefixtures("no_grad")


def test_gamma_one_gives_the_stock_backend_s_outputs_and_cache():
    stock, ours = Served(), Served(KEEP_ALL)
    torch.testing.assert_close(outputs(ours), outputs(stock))
    assert all(map(torch.equal, ours.cache(0), stock.cache(0)))
    counters = ours.engine.counters
    assert (counters.sparse_tokens, counters.dense_tokens) == (200 + 207 + 164 + 150, 20 + 15)
    assert counters.density == pytest.approx(1)


def test_the_attention_layers_of_a_mixture_are_served_through_sglang_s_wrapper():
    """As in Qwen3.5 and Nemotron-H: their pool counts attention layers, the model all."""
    stock, ours, sparse = ServedMixture(), ServedMixture(KEEP_ALL), ServedMixture(SPARSE)
    wanted = outputs(stock)
    torch.testing.assert_close(outputs(ours), wanted)
    assert all(map(torch.equal, ours.cache(3), stock.cache(3)))
    assert not any(map(torch.count_nonzero, ours.cache(1)))
    assert ours.engine.counters.sparse_tokens == 200 + 207 + 164 + 150
    assert ours.linear.init_forward_metadata.call_count == len(STEPS)
    # as without the wrapper
    found = outputs(sparse)
    torch.testing.assert_close(found, outputs(Served(SPARSE)))
    assert max((out - each).abs().max() for out, each in zip(found, wanted, strict=True)) > 1


def test_a_cache_that_another_kernel_wrote_is_only_read():
    """As qwen3_moe's rotary embedding does on CUDA."""
    stock, ours = Served(), Served(KEEP_ALL)
    torch.testing.assert_close(outputs(ours, writer="another kernel"), outputs(stock))
    assert ours.engine.counters.sparse_tokens == 200 + 207 + 164 + 150
    unwritten = Served(KEEP_ALL)
    torch.testing.assert_close(unwritten.step([(0, 0, 200)], writer="nobody"), stock.step([(0, 0, 200)]))
    assert not unwritten.pool.get_key_buffer(0).any()


@pytest.mark.parametrize("cache", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_an_fp8_cache_rounds_only_what_was_there_before_the_chunk(cache):
    stock, ours = Served(cache=cache), Served(KEEP_ALL, cache=cache)
    assert ours.engine.sparse_layers
    for number, (chunks, out, rounded) in enumerate(zip(STEPS, *map(outputs, (ours, stock)), strict=True)):
        start = 0
        for request, before, rows in chunks:
            own = slice(start, start + rows)
            wanted = rounded[own]
            if rows >= KEEP_ALL.block_size:
                wanted = attention(request, before, rows, lambda x: x.to(cache).float())
            torch.testing.assert_close(out[own], wanted, msg=lambda told, number=number: f"step {number}: {told}")
            start += rows
    assert all(torch.equal(one.float(), other.float()) for one, other in zip(ours.cache(0), stock.cache(0), strict=True))


def attention(request, before, rows, rounded):
    """Of one chunk, (rows, HEADS * DIM), behind `before` tokens whose keys and values are rounded."""
    query, key, value = (
        Served.data(kind, request)[: before + rows].unflatten(1, (-1, DIM)) for kind in ("query", "key", "value")
    )
    key, value = (torch.cat([rounded(x[:before]), x[before:]]) for x in (key, value))
    return rows_attention(query[before:], key, value, DIM**-0.5).flatten(1)


@pytest.mark.parametrize("kind", [torch.tensor, float])
def test_scales_of_an_fp8_cache(kind):
    """A model with a file of scales (--quantization-param-path) has floats."""
    ours = Served(KEEP_ALL, cache=torch.float8_e4m3fn, kernel="fa3")
    ours.model.attn.k_scale = ours.model.attn.v_scale = kind(0.03)
    for before, rows in ((0, 200), (200, 100)):
        # writing a chunk's own keys and values, which the pool divides in place, must not change them
        wanted = attention(0, before, rows, lambda x: (x / 0.03).to(torch.float8_e4m3fn).float() * 0.03)
        torch.testing.assert_close(ours.step([(0, before, rows)]), wanted)


def test_padding_rows_are_zero_in_an_output_that_sglang_may_give():
    given = torch.full((224, HEADS * DIM), math.nan)
    for options in ({}, {"_attn_output": given}):
        out = Served(KEEP_ALL).step([(0, 0, 200)], padding=24, **options)
        assert out.shape[0] == 224
        assert torch.count_nonzero(out[:200]) and not torch.count_nonzero(out[200:])
    assert out.data_ptr() == given.data_ptr() and not given.isnan().any()


def test_steps_in_cuda_graphs_and_of_decoding_run_stock(monkeypatch):
    monkeypatch.setattr(TorchNativeAttnBackend, "forward_extend", lambda *_: "stock")
    ours = Served(SPARSE)
    ours.step([(0, 0, 200)])
    assert ours.engine.step is not None
    ours.backend.init_forward_metadata_out_graph(SimpleNamespace(), in_capture=True)
    assert ours.engine.step is ours.engine.split_to_count is None
    # a split is not used for another kind of step either
    ours.step([(0, 0, 200)])
    batch = SimpleNamespace(forward_mode=ForwardMode.TARGET_VERIFY)
    assert ours.backend.forward_extend(None, 1, 1, ours.model.attn, batch) == "stock"
