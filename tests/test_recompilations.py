"""Compiled a handful of times: lengths, kinds of calls and models share compilations, and where those run out a call raises."""

from __future__ import annotations

import pytest
import torch
import torch._dynamo
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.attention.flex_attention import flex_attention

from flexmask import _torch, block_masks, compilation, flexprefill_mask
from tests.attention_calls import flexprefill_attention
from tests.compile_support import KEY, LENGTHS, PADDING, QUERY, SPARSE, assert_same_lists, cut, dense_under, traced
from tests.compile_support import counting as counting
from tests.compile_support import fresh_compiler as fresh_compiler

CPP_ERROR = pytest.mark.xfail(
    not _torch.CPU_TAKES_UNBACKED_SIZES, reason="this torch writes C++ that does not compile: flexmask._torch"
)


@pytest.mark.attention
def test_mask_and_attention_in_one_function_serve_all_lengths():
    def attend(query, key, value):
        mask = flexprefill_mask(query, key, **SPARSE)
        return flex_attention(query, key, value, block_mask=mask, enable_gqa=True), mask.kv_num_blocks

    run, counter = traced(attend, dynamic=True)
    for length in LENGTHS:
        inputs = cut(length, batch=1, num_kv_heads=1)
        out, counts = run(*inputs)
        mask = flexprefill_mask(*inputs[:2], **SPARSE)
        assert torch.equal(counts, mask.kv_num_blocks)
        torch.testing.assert_close(out, dense_under(mask, *inputs), atol=2e-5, rtol=0)
    assert counter.frame_count <= 2


@pytest.mark.attention
def test_attention_inside_another_compilation_is_one_graph(monkeypatch):
    # what counts the graphs stands for Inductor here; other compilers get no sparse attention
    monkeypatch.setattr("flexmask.flex.run.runs_flex_attention_uncompiled", lambda: False)
    run, counter = traced(lambda *inputs: flexprefill_attention(*inputs, **SPARSE, dense_below=0))
    assert run(*cut(200)).shape == (2, 4, 200, 24)
    assert counter.frame_count == 1


def test_changing_numbers_are_not_compiled_each():
    def mask(query, key, gamma, tau, q_offset):
        return flexprefill_mask(query, key, gamma, tau, block_size=32, min_budget=0, q_offset=q_offset)

    run, counter = traced(mask)
    query = QUERY[:, :, :100].contiguous()
    for step in range(1, 8):
        # torch 2.5 takes every float for a constant
        floats = (0.6, 0.1) if torch._dynamo.config.specialize_float else (step / 10, step / 20)
        numbers = *floats, 61 * step
        assert_same_lists(run(query, KEY, *numbers), mask(query, KEY, *numbers))
    assert counter.frame_count <= 2


@pytest.mark.attention
@pytest.mark.slow
@pytest.mark.parametrize("padded", [False, pytest.param(True, marks=CPP_ERROR)], ids=["whole", "padded"])
def test_attention_called_plainly_serves_all_lengths(padded):
    graphs = torch._dynamo.utils.counters["stats"]
    before = graphs["unique_graphs"]
    for length in LENGTHS:
        inputs = cut(length)
        options = {**SPARSE, "attention_mask": PADDING[:, -length:]} if padded else SPARSE
        out = flexprefill_attention(*inputs, **options, dense_below=0)
        # sparse indeed, at every length: a silent dense fallback would not equal it
        torch.testing.assert_close(out, dense_under(flexprefill_mask(*inputs[:2], **options), *inputs), atol=2e-5, rtol=0)
    assert 1 <= graphs["unique_graphs"] - before <= 5


@pytest.mark.attention
@CPP_ERROR
def test_masks_in_a_compilation_of_the_user_serve_all_lengths():
    run = torch.compile(lambda *inputs: flex_attention(*inputs[:3], block_mask=inputs[3], enable_gqa=True), fullgraph=True)
    graphs = torch._dynamo.utils.counters["stats"]
    before = graphs["unique_graphs"]
    for step, length in enumerate(LENGTHS):
        inputs = cut(length)
        mask = flexprefill_mask(*inputs[:2], **SPARSE, attention_mask=PADDING[:, -length:], window=100 + step)
        torch.testing.assert_close(run(*inputs, mask), dense_under(mask, *inputs), atol=2e-5, rtol=0)
    assert 1 <= graphs["unique_graphs"] - before <= 3


@pytest.mark.attention
def test_calls_of_all_kinds_share_the_compilations_of_one_model(counting):
    for batch in (1, 2):
        for length in LENGTHS[:8]:
            query, key, value = cut(length, batch)
            flexprefill_attention(query, key, value, **SPARSE, dense_below=0)
            # a chunk, and the layout in which Hugging Face's models hand queries over
            query = query[:, :, length // 2 :].transpose(1, 2).contiguous().transpose(1, 2)
            flexprefill_attention(query, key, value, **SPARSE, dense_below=0)
    assert counting.frame_count <= getattr(torch._dynamo.config, _torch.recompile_limit())


@pytest.mark.attention
def test_windows_share_a_compilation(counting):
    inputs, options = cut(200), {**SPARSE, "dense_below": 0}
    flexprefill_attention(*inputs, **options)
    without = counting.frame_count
    for window in (60, 90, 140):
        flexprefill_attention(*inputs, **options, window=window)
    assert counting.frame_count == without + 1


@pytest.mark.parametrize("method", ["flexprefill", "hybrid", "streaming_llm", "xattention"])
def test_windows_share_the_compilations_of_a_selection(counting, monkeypatch, method):
    mask_of, inputs = getattr(block_masks, f"{method}_mask"), cut(200)[:2]
    windows = (60, 90, 140, 1000)
    expected = [mask_of(*inputs, block_size=32, window=window) for window in windows]
    monkeypatch.setattr(compilation, "runs_plain", lambda query: False)  # as on accelerators
    compilations = []
    for window, mask in zip(windows, expected, strict=True):
        assert_same_lists(mask_of(*inputs, block_size=32, window=window), mask)
        compilations.append(counting.frame_count)
    # the second window makes it a symbol, which serves all
    assert 1 <= compilations[0] and compilations[1] == compilations[-1] <= 2 * compilations[0]


@pytest.mark.parametrize("window", [60, 4096])
def test_prompts_shorter_than_a_window_are_not_compiled_each(counting, monkeypatch, window):
    monkeypatch.setattr(compilation, "runs_plain", lambda query: False)
    for length in (200, 300, 400, 50):
        block_masks.hybrid_mask(*cut(length)[:2], block_size=32, window=window)
    assert counting.frame_count == 1


@pytest.mark.attention
def test_one_model_does_not_use_up_the_compilations_of_another(counting):
    with torch._dynamo.config.patch({_torch.recompile_limit(): 2}):
        for head_dim in (16, 32, 48, 64):
            for length in (100, 200, 300):
                query, key = torch.randn(1, 2, length, head_dim), torch.randn(1, 1, length, head_dim)
                flexprefill_attention(query, key, key, block_size=32, dense_below=0)
    assert 4 <= counting.frame_count <= 2 * 4


def test_heads_stay_numbers_in_the_search(monkeypatch):
    """Inductor (2.11) fails with symbolic heads. Torch keeps by a function's name what sizes it saw change."""
    seen = []

    def backend(graph, inputs):
        values = [node.meta["example_value"] for node in graph.graph.find_nodes(op="placeholder")]
        seen.append([[size for size in x.shape[1:] if type(size) is int] for x in values if isinstance(x, Tensor)])
        return graph.forward

    def scores(query: Tensor, key: Tensor) -> Tensor:
        return query.sum() * key.sum()

    compile_with = torch.compile
    monkeypatch.setattr(torch, "compile", lambda function, **options: compile_with(function, backend=backend, **options))
    for heads, length in ((4, 600), (2, 333), (4, 100)):
        query, key, _ = cut(length)
        query = query[:, :heads].contiguous()
        compilation.compiled(scores, (heads,))(_torch.with_dynamic(query, 2), _torch.with_dynamic(key, 2))
    assert seen == [[[4, 16], [2, 16]], [[2, 16], [2, 16]]]


def test_numbers_of_a_variant_stay_numbers(monkeypatch):
    """Where another variant had others, too: graphs of symbolic block sizes are alike, and a wrong one ran (torch 2.11)."""
    seen = []

    def backend(graph, inputs):
        seen.append([node.meta["example_value"] for node in graph.graph.find_nodes(op="placeholder")])
        return graph.forward

    def rows(tokens: Tensor, block_size: int, options: dict[str, int], scale: float) -> Tensor:
        return tokens[:block_size] * options["tile"] * scale

    compile_with = torch.compile
    monkeypatch.setattr(torch, "compile", lambda function, **options: compile_with(function, backend=backend, **options))
    tokens = torch.arange(100.0)
    for block_size, tile, scale in ((64, 32, 0.5), (48, 16, 0.25), (32, 32, 2.0)):
        run = compilation.compiled(rows, (block_size, tile, scale))
        assert torch.equal(run(tokens, block_size, {"tile": tile}, scale), tokens[:block_size] * tile * scale)
    assert [[type(x) for x in inputs] for inputs in seen] == [[FakeTensor]] * 3


def test_mask_on_a_cpu_compiles_nothing(counting):
    flexprefill_mask(QUERY, KEY, **SPARSE)
    assert counting.frame_count == 0


@pytest.mark.attention
def test_recompilations_that_run_out_raise(counting):
    inputs = cut(200)
    query, key, value = cut(300)
    query = query.transpose(1, 2).contiguous().transpose(1, 2)  # no graph serves both layouts
    with torch._dynamo.config.patch({_torch.recompile_limit(): 1}):
        out = flexprefill_attention(*inputs, **SPARSE, dense_below=0)
        for _ in range(2):
            with pytest.raises(RuntimeError, match=rf"never runs uncompiled: raise .*\.{_torch.recompile_limit()}"):
                flexprefill_attention(query, key, value, **SPARSE, dense_below=0)
        assert torch.equal(flexprefill_attention(*inputs, **SPARSE, dense_below=0), out)
    assert counting.frame_count == 1
