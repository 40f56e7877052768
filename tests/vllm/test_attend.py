"""One request's chunk: the core's own attention in the engine's layout, at any length."""

from __future__ import annotations

import pytest
import torch

from flexmask import flexprefill_attention, sparse_attention
from flexmask.integrations.settings import PrefillSettings
from flexmask.integrations.vllm import attend as attend_module
from flexmask.integrations.vllm.attend import attend, visible_blocks
from flexmask.integrations.vllm.counters import Counters
from flexmask.integrations.vllm.layers import sparse_layer
from flexmask.integrations.vllm.plan import plan_step
from flexmask.integrations.vllm.startup import call_of_size, warm_up
from flexmask.integrations.vllm.warm_sizes import grouped_sizes, heads_together, warm_sizes

GIVEN = {"num_heads": 4, "head_size": 32, "scale": 0.2, "num_kv_heads": 2}
OPTIONS = {"gamma": 0.7, "block_size": 32, "min_budget": 0}
# from some hundred tokens on the masks of all heads are not made at a time
FEW_HEADS = {"block_size": 32, "max_mask_bytes": 400_000}
METHOD = {"method": "streaming_llm", "method_options": {"window_blocks": 2}, "block_size": 32}


@pytest.mark.attention
def test_calls_after_the_warm_up_are_the_core_s_and_compile_nothing():
    from torch._dynamo.utils import counters

    # lengths far below dense_below, which the plan of a step looks at
    layer = sparse_layer(0, GIVEN, PrefillSettings.from_options(**OPTIONS), 0, 1)
    with torch.inference_mode():
        assert warm_up([layer, layer], (600, 2000), torch.device("cpu"), torch.float32, True) > 0
        compiled = counters["stats"]["unique_graphs"]
        for rows in (150, 420, 32):  # a chunk, a prompt, a chunk of one block
            query, key, value = torch.randn(rows, 4, 32), torch.randn(2, 420, 32), torch.randn(2, 420, 32)
            batch = (query.transpose(0, 1)[None], key[None], value[None])

            out, density = attend(layer, query, key, value, count_density=True)
            expected, stats = flexprefill_attention(*batch, scale=0.2, dense_below=0, return_stats=True, **OPTIONS)
            torch.testing.assert_close(out.transpose(0, 1), expected[0])
            torch.testing.assert_close(density, stats.density.mean())
            assert density < 0.9
    assert counters["stats"]["unique_graphs"] == compiled


@pytest.mark.attention
@pytest.mark.usefixtures("without_kernel")
@pytest.mark.parametrize(
    ("selection", "max_mask_bytes", "window"),
    [("coverage", 1, 300), pytest.param("hybrid", 2**30, None, marks=pytest.mark.slow)],
)
def test_the_density_is_the_statistics_but_is_counted_without_them(selection, max_mask_bytes, window, monkeypatch):
    given = {**GIVEN, "sliding_window": window} if window else GIVEN
    options = {**OPTIONS, "gamma": 0.3, "selection": selection, "max_mask_bytes": max_mask_bytes, "dense_below": 0}
    settings = PrefillSettings.from_options(**options)
    layer = sparse_layer(0, given, settings, 0, 1)
    asked = []
    own = attend_module.attention_to_kept

    def watched(*arguments, **options):
        asked.append(options.get("return_stats", False))
        return own(*arguments, **options)

    monkeypatch.setattr(attend_module, "attention_to_kept", watched)
    for rows in (150, 420):
        query, key, value = torch.randn(rows, 4, 32), torch.randn(2, 420, 32), torch.randn(2, 420, 32)
        batch = (query.transpose(0, 1)[None], key[None], value[None])
        _, density = attend(layer, query, key, value, count_density=True)
        _, stats = flexprefill_attention(*batch, scale=0.2, window=window, return_stats=True, **options)
        torch.testing.assert_close(density, stats.density.mean())
        assert density < 1
    # the others of the statistics would be computed for nothing
    assert asked == [False, False]


@pytest.mark.parametrize("window", [None, 1, 33, 100])
@pytest.mark.parametrize(("rows", "tokens"), [(150, 420), (420, 420), (32, 420), (64, 64), (1, 33)])
def test_visible_blocks_are_those_of_the_written_out_mask(rows, tokens, window):
    position, key = torch.arange(tokens - rows, tokens)[:, None], torch.arange(tokens)
    seen = (key <= position) & (key > position - (window or tokens + 1))
    padded = torch.nn.functional.pad(seen, (0, -tokens % 32, 0, -rows % 32))
    blocks = padded.unflatten(0, (-1, 32)).unflatten(2, (-1, 32)).any(3).any(1)
    assert visible_blocks(rows, tokens, 32, window) == blocks.sum()


def test_sizes_of_the_warm_up():
    # blocks of 64 can be fewer rows than FlexAttention's main kernel takes
    layer = sparse_layer(0, GIVEN, PrefillSettings.from_options(block_size=64), 0, 1)
    short = [size for size in warm_sizes(layer, (4096, 8192), torch.device("cpu")) if size[0] < 128]
    assert short == [(64, 1100), (127, 1100)]
    layer = sparse_layer(0, GIVEN, PrefillSettings.from_options(block_size=64, dense_below=100), 0, 1)
    assert (127, 127) in warm_sizes(layer, (4096, 8192), torch.device("cpu"))
    layer = sparse_layer(0, GIVEN, PrefillSettings.from_options(), 0, 1)
    assert min(warm_sizes(layer, (4096, 8192), torch.device("cpu"))) == (128, 1100)
    assert grouped_sizes(layer, (4096, 8192), torch.device("cpu")) == []


@pytest.mark.parametrize("largest", [(2048, 2048), (512, 2048), (64, 2048)])
def test_every_number_of_heads_that_goes_together_is_warmed_up_twice(largest):
    layer = sparse_layer(0, GIVEN, PrefillSettings.from_options(**FEW_HEADS), 0, 1)
    sizes, cpu = grouped_sizes(layer, largest, torch.device("cpu")), torch.device("cpu")
    found = [(heads_together(layer, size, cpu), size[0] == size[1]) for size in sizes]
    reached = set()
    for tokens in range(160, largest[1] + 1, 32):
        for size in ((tokens, tokens), (min(largest[0], tokens - 64), tokens)):
            heads = heads_together(layer, size, cpu)
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
    from torch._dynamo.utils import counters

    layer = sparse_layer(0, GIVEN, PrefillSettings.from_options(**{**OPTIONS, **FEW_HEADS}), 0, 1)
    cpu, largest = torch.device("cpu"), (1024, 1024)
    with torch.inference_mode():
        warm_up([layer], largest, cpu, torch.float32, True)
        for size in grouped_sizes(layer, largest, cpu):
            call_of_size(layer, size, cpu, torch.float32, True)
        compiled = counters["stats"]["unique_graphs"]
        for size in ((1024, 1024), (800, 1024), (900, 900)):
            assert heads_together(layer, size, cpu) < 4
            call_of_size(layer, size, cpu, torch.float32, True)
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
