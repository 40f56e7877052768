"""Compiled a handful of times, by `warmup` before any call: all kinds of calls share that; where it runs out a call raises."""

from __future__ import annotations

import functools
import logging

import pytest
import torch
import torch._dynamo
from torch._dynamo.utils import counters
from torch.nn.attention.flex_attention import flex_attention

from flexmask import _torch, block_masks, flexprefill_mask, logged_once, sparse_attention, warmup
from flexmask._torch import CPU_TAKES_UNBACKED_SIZES
from flexmask.block_masks import published_mask
from tests.attention_calls import CPP_ERROR, flexprefill_attention
from tests.compile_support import KEY, PADDING, QUERY, SPARSE, assert_same_lists, cut, dense_under, recompilations, traced
from tests.compile_support import as_on_accelerators as as_on_accelerators
from tests.compile_support import counting as counting
from tests.compile_support import fresh_compiler as fresh_compiler

LENGTHS = (600, 333, 512, 64, 65, 100, 127, 128, 129, 160, 200, 255, 256, 257, 300, 384, 401, 450, 555, 599)


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


@pytest.mark.parametrize("by_head", [False, True])
def test_changing_numbers_are_not_compiled_each(by_head):
    def mask(query, key, gamma, tau, q_offset):
        return flexprefill_mask(query, key, gamma, tau, block_size=32, min_budget=0, q_offset=q_offset)

    run, counter = traced(mask)
    query = QUERY[:, :, :100].contiguous()
    for step in range(1, 8):
        # torch 2.5 takes every float for a constant
        gamma, tau = (0.6, 0.1) if torch._dynamo.config.specialize_float else (step / 10, step / 20)
        numbers = torch.tensor([0.43, 1.0, 0.71, 0.91]).roll(step) if by_head else gamma, tau, 61 * step
        assert_same_lists(run(query, KEY, *numbers), mask(query, KEY, *numbers))
    assert counter.frame_count <= 2


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


def mask_of(method, length, **options):
    return getattr(block_masks, f"{method}_mask")(*cut(length)[:2], block_size=32, **options)


@pytest.mark.parametrize(
    "method",
    [
        "hybrid",
        "xattention",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("flexprefill", "streaming_llm", "vertical_slash")),
    ],
)
def test_windows_and_lengths_share_the_compilations_of_a_selection_of_which_a_cpu_has_none(counting, request, method):
    windows, lengths = (60, 90, 140, 1000), (300, 333, 257)
    expected = [mask_of(method, 200, window=window) for window in windows] + [mask_of(method, length) for length in lengths]
    assert counting.frame_count == 0
    request.getfixturevalue("as_on_accelerators")
    compilations = []
    for window, mask in zip(windows, expected, strict=False):
        assert_same_lists(mask_of(method, 200, window=window), mask)
        compilations.append(counting.frame_count)
    # the second window makes it a symbol, which serves all
    assert 1 <= compilations[0] and compilations[1] == compilations[-1] <= 2 * compilations[0]
    for length, mask in zip(lengths, expected[len(windows) :], strict=True):
        assert_same_lists(mask_of(method, length), mask)
    assert counting.frame_count == compilations[-1] + compilations[0]


@pytest.mark.usefixtures("as_on_accelerators")
@pytest.mark.parametrize("window", [60, 4096])
def test_prompts_shorter_than_a_window_are_not_compiled_each(counting, window):
    for length in (200, 300, 400, 50):
        mask_of("hybrid", length, window=window)
    assert counting.frame_count == 1


@pytest.mark.usefixtures("as_on_accelerators")
def test_values_of_a_float_share_a_compilation_and_constants_do_not(counting):
    for threshold in (0.3, 0.5, 1, 0.9):
        mask_of("xattention", 300, threshold=threshold)
    assert counting.frame_count == 1
    mask_of("xattention", 300, stride=4)
    assert counting.frame_count == 2


@pytest.mark.attention
def test_one_model_does_not_use_up_the_compilations_of_another(counting):
    with recompilations(2):
        for head_dim in (16, 32, 48, 64):
            for length in (100, 200, 300):
                query, key = torch.randn(1, 2, length, head_dim), torch.randn(1, 1, length, head_dim)
                flexprefill_attention(query, key, key, block_size=32, dense_below=0)
    assert 4 <= counting.frame_count <= 2 * 4


@pytest.mark.attention
def test_recompilations_that_run_out_raise(counting):
    inputs = cut(200)
    query, key, value = cut(300)
    query = query.transpose(1, 2).contiguous().transpose(1, 2)  # no graph serves both layouts
    with recompilations(1):
        out = flexprefill_attention(*inputs, **SPARSE, dense_below=0)
        for _ in range(2):
            with pytest.raises(RuntimeError, match=rf"never runs uncompiled: raise .*\.{_torch.recompile_limit()}"):
                flexprefill_attention(query, key, value, **SPARSE, dense_below=0)
        assert torch.equal(flexprefill_attention(*inputs, **SPARSE, dense_below=0), out)
    assert counting.frame_count == 1


def test_every_compilation_is_announced_by_what_is_new(caplog, monkeypatch):
    monkeypatch.setattr(logged_once, "_SAID", set())

    monkeypatch.setattr(torch, "compile", lambda function, **_: functools.partial(function))

    def attend(batch, head_dim=16):
        query, key = torch.randn(batch, 2, 96, head_dim), torch.randn(batch, 1, 96, head_dim)
        with pytest.raises(RuntimeError, match=r"torch\.compile is switched off"):  # as nothing is compiled
            sparse_attention(query, key, key, block_size=32, min_budget=0, dense_below=0)

    with caplog.at_level(logging.WARNING, logger="flexmask"):
        with torch.no_grad():
            for batch in (1, 2, 3, 2):
                attend(batch)
            attend(1, head_dim=32)
        with torch.enable_grad():
            attend(1)
    lines = [message for message in caplog.messages if "compiling" in message]
    assert len({*lines}) == len(lines) == 5
    assert [f"batch {number}" in message for number, message in zip((1, 2, 3), lines, strict=False)] == [True] * 3
    assert "again, for other heads or sizes" in lines[3] and "again, for another mode (gradients" in lines[4]


@pytest.mark.attention
@pytest.mark.parametrize(("chunked", "padded"), [(False, False), (True, True)])
def test_no_call_compiles_after_a_warmup(device, chunked, padded, caplog, request):
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
        query, key, value = (torch.randn(1, h, length, 32, device=device) for h in (4, 2, 2))
        query = query[:, :, length // 3 :].contiguous() if chunked else query
        mask = torch.arange(length, device=device)[None] >= 5 if padded else None
        flexprefill_attention(query, key, value, attention_mask=mask, dense_below=0, gamma=0.8, **options)
    assert counters["stats"]["unique_graphs"] == before and not caplog.records


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
def test_options_that_warmup_does_not_take_are_refused(name):
    with pytest.raises(TypeError, match=f"{name} is not an option of warmup"):
        warmup(1, 1, 16, dtype=torch.float32, device="cpu", **{name: None})
