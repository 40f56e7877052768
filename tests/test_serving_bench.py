"""The benchmark of serving: its table, and the options that it gives."""

from __future__ import annotations

import json

import pytest
import torch

pytest.importorskip("transformers")

from bench.rows import Sheet
from bench.serving import packed_call, prefill_profile, table
from bench.serving.first_token import ALL_SHAPES, described, parse, shape_folder
from flexmask.attend import attend
from flexmask.base.inputs import attention_inputs
from flexmask.integrations.huggingface.settings import PrefillSettings

ENGINE = {"device": "GPU", "vllm": "0.26.0", "model": "m", "layers": None, "gpus": 1}
ROW = {**ENGINE, "prompt_tokens": 32768, "chunk": None, "first_seconds": 3.0, "compiled_by_first": 0, "peak_gb": 4.0}
BATCH = {**ENGINE, "prompt_tokens": 32768, "at_once": 4, "new_tokens": 8}
LATENCIES = {"first_token_seconds": [1.0, 4.0, 2.0], "seconds_a_token_after": [0.01, 0.03, 0.02]}
ROWS = [
    {**ROW, "method": "sparse", "seconds": 9.0, "density": 0.2},
    {**ROW, "method": "stock", "seconds": 2.0, "density": None},
    {**ROW, "method": "sparse", "seconds": 0.8, "density": 0.2},  # measured again
    {**ROW, "method": "sparse", "seconds": 0.5, "density": 0.2, "gpus": 2},
    {**BATCH, "method": "stock", "tokens_per_second": 1000.0},
    {**BATCH, "method": "sparse", "tokens_per_second": 1500.0, **LATENCIES},
]


RUNS = [(None, "stock", 2.0), (None, "sparse", 1.0), ("second", "stock", 3.0), ("second", "sparse", 1.0)]


def test_table_compares_with_the_stock_backend_at_the_same_length(tmp_path, capsys):
    (tmp_path / "serving-x.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS), encoding="utf-8")
    table.main(["--results", str(tmp_path)])
    written = capsys.readouterr().out
    assert "| 32k | whole | sparse | 0.200 | 0.800 s | 2.50x | 3.000 s, 0 | 4.0 GB |" in written
    # of two GPUs nothing is known but the times
    assert "| 32k | whole | sparse | 0.200 | 0.500 s | - | 3.000 s, - | 4.0 GB |" in written
    assert "9.000 s" not in written
    assert "| 4 x 32k, 8 more each | sparse | 1,500 | 1.50x | 2.00 s, 4.00 s | 20.0 ms |" in written
    assert "| 4 x 32k, 8 more each | stock | 1,000 | - | - | - |" in written


def test_rows_of_another_run_are_not_compared(tmp_path, capsys):
    rows = [{**ROW, "run": run, "method": method, "seconds": s} for run, method, s in RUNS]
    (tmp_path / "serving-x.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    table.main(["--results", str(tmp_path)])
    first, second = capsys.readouterr().out.split(": second")
    assert "| 2.00x |" in first
    assert "| 3.00x |" in second


def test_steps_are_compared_at_the_same_cache(tmp_path, capsys):
    step = {**dict.fromkeys(prefill_profile.COLUMNS, ""), "model": "m", "prompts": "1", "prompt_tokens": "32768", "rounds": "2"}
    times = [("auto", "stock", 1200.0), ("auto", "hybrid", 800.0), ("fp8", "stock", 1000.0), ("fp8", "hybrid", 800.0)]
    sheet = Sheet(tmp_path / "step-x.csv", prefill_profile.COLUMNS, prefill_profile.IDENTITY)
    for cache, attention, milliseconds in times:
        own = {**step, "kv_cache": cache, "attention": attention}
        sheet.add(**{**own, "kind": "ttft", "part": "first token", "milliseconds": milliseconds, "density": 0.25})
    for number, part in enumerate(("attention", "linear layers", "copies", "masks", "rest", "idle", "host"), start=1):
        own = {**step, "kv_cache": "fp8", "attention": "hybrid"}
        sheet.add(**{**own, "kind": "kernels", "part": part, "milliseconds": 10.0 * number})
    table.main(["--results", str(tmp_path)])
    written = capsys.readouterr().out
    assert "| m | auto | 32k | hybrid | 0.250 | 0.800 s | 1.50x | 2 |" in written
    assert "| m | fp8 | 32k | hybrid | 0.250 | 0.800 s | 1.25x | 2 |" in written
    assert "| m | fp8 | 32k | hybrid | 10 ms | 20 ms | 30 ms | 40 ms | 50 ms | 60 ms | 70 ms |" in written


def test_kernels_are_told_by_kind(tmp_path, capsys):
    names = {"nvjet_tst_128x256": 3000.0, "flash::FlashAttnFwdSm90": 1400.0, "void at::native::scan<int>": 60.0}
    kernels = {**names, "void at::native::direct_copy_kernel": 40.0, "triton_red_fused_add": 300.0}
    kernels |= {"vllm::reshape_and_cache_flash_kernel": 27.0, "at::native::unrolled_elementwise_kernel<direct_copy>": 31.0}
    profile = {**ENGINE, "prompt_tokens": 32768, "method": "sparse", "kernels_ms": kernels, "all_kernels_ms": 5000.0}
    memory = {**ROW, "method": "sparse", "seconds": 1.0, "peak_gb": 50.0, "profiled_gb": 32.5, "cache_gb": 18.0}
    (tmp_path / "serving-x.jsonl").write_text("".join(json.dumps(row) + "\n" for row in (profile, memory)), encoding="utf-8")
    table.main(["--results", str(tmp_path)])
    written = capsys.readouterr().out
    assert "| 32k | sparse | 1,400 ms | 3,000 ms | 67 ms | 91 ms | 442 ms | 5,000 ms |" in written
    assert "| 32.0 of 32.5 GB |" in written


def test_options_are_those_under_flexmask():
    given = ["--model", "m", "--json", "out"]
    options = parse([*given, "--settings", '{"method": "random_blocks", "density": 0.2, "dense_below": 16384}'])
    assert options.settings == {"method": "random_blocks", "density": 0.2, "dense_below": 16384}
    assert described(options) == "random_blocks, density 0.2"
    assert described(parse([*given, "--settings", '{"gamma": 0.9}'])) == "hybrid, gamma 0.9"
    assert described(parse([*given, "--stock"])) == "stock"
    with pytest.raises(SystemExit):
        parse([*given, "--stock", "--settings", "{}"])


@pytest.mark.usefixtures("without_kernel")
@pytest.mark.parametrize("tokens", [4096, 8192])
def test_hybrid_has_its_density_of_real_text_where_attention_is_even(tokens):
    own = PrefillSettings.from_dict({**prefill_profile.settings_of("hybrid", tokens, 0.2), "dense_below": 0})
    even = torch.zeros(1, 2, tokens, 16)
    inputs = attention_inputs(even, even, even)
    found = attend(inputs, own.selector().for_inputs(inputs), own.run_options, statistics=("density",))
    assert found.stats is not None
    shortest, longest = (prefill_profile.OWN_DENSITY[each] for each in (8192, 65536))
    assert prefill_profile.own_density(tokens) == shortest
    assert prefill_profile.own_density(100 * tokens) == longest
    assert found.stats.density.mean().item() == pytest.approx(shortest, abs=0.03)


def test_a_step_is_taken_apart_by_kernels():
    events = [
        ("nvjet_tst", 100.0, 50.0),
        ("flash::Fwd", 150.0, 30.0),
        ("_evidence_kernel", 190.0, 5.0),
        ("nvjet_tst", 200.0, 100.0),
    ]
    parts = prefill_profile.parts_of(list(reversed(events)), 0.001)
    wanted = {"linear layers": 0.15, "attention": 0.03, "masks": 0.005, "idle": 0.015, "host": 0.8, "number of kernels": 4.0}
    assert parts == pytest.approx(wanted)
    # two streams at once: nothing is idle
    assert prefill_profile.parts_of([("nvjet", 0.0, 100.0), ("nccl", 10.0, 20.0), ("nvjet", 100.0, 10.0)], 0.0)["idle"] == 0


def test_spans_are_summed_up_by_name():
    spans = prefill_profile.Spans("cpu")
    timed = spans.around("mask", lambda number, *, more: number + more)
    assert [timed(1, more=2), timed(3, more=4)] == [3, 7]
    spans.around("kernel", lambda: None)()
    assert set(spans.milliseconds()) == {"mask", "kernel"}
    assert spans.milliseconds()["mask"] > 0


@pytest.mark.parametrize("shape", ALL_SHAPES)
def test_shapes_are_configs_of_their_models(shape, tmp_path):
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(shape_folder(shape, tmp_path, 2))
    family, sizes = ALL_SHAPES[shape]
    assert (config.architectures, config.num_hidden_layers) == ([f"{family}ForCausalLM"], 2)
    assert all(getattr(config, name) == value for name, value in sizes.items() if name != "num_hidden_layers")


@pytest.mark.attention
def test_one_call_for_several_prompts_gives_what_a_call_each_gives():
    own = PrefillSettings.from_options(gamma=0.7, block_size=32, min_budget=32, dense_below=0)
    lengths = (192, 64, 320)
    prompts = [attention_inputs(*(torch.randn(1, heads, length, 16) for heads in (4, 2, 2))).prepared() for length in lengths]
    kept = packed_call.selected(own.selector(), prompts)
    density = [(each.lists.kv_num_blocks + each.lists.full_kv_num_blocks).float().mean() for each in kept]
    assert density[2] < 5  # of 5.5 that are visible
    together = packed_call.packed(packed_call.in_one(prompts), kept, "cpu").split(lengths, 2)
    for ours, expected in zip(together, packed_call.separate(prompts, kept, "cpu"), strict=True):
        torch.testing.assert_close(ours, expected)
