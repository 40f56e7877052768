"""The benchmark of serving: table, options, profiles."""

import csv
import json

import pytest
import torch

pytest.importorskip("transformers")

from bench.serving import chunk_rows, packed_call, prefill_profile, table
from flexmask.attend import attend
from flexmask.base.inputs import attention_inputs
from flexmask.integrations.serving.layers import LayerShape
from flexmask.settings import PrefillSettings

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


def test_table_compares_with_the_stock_backend_at_the_same_length(tmp_path, capsys):
    (tmp_path / "serving-x.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS), encoding="utf-8")
    table.main(["--results", str(tmp_path)])
    written = capsys.readouterr().out
    assert "| 32k | whole | sparse | 20.0% | 0.800 s | 2.50x | 3.000 s, 0 | 4.0 GB |" in written
    # of two GPUs nothing is known but the times
    assert "| 32k | whole | sparse | 20.0% | 0.500 s | - | 3.000 s, - | 4.0 GB |" in written
    assert "9.000 s" not in written
    assert "| 4 x 32k, 8 more each | sparse | 1,500 | 1.50x | 2.00 s, 4.00 s | 20.0 ms |" in written
    assert "| 4 x 32k, 8 more each | stock | 1,000 | - | - | - |" in written


def test_table_compares_sglang_s_engines_by_prompt():
    head = "model,kernel,attention,prompts,prompt_tokens,new_tokens,device,sglang,seconds,density,rounds,chunk"
    lines = ["m,fa3,stock,1,32768,1,GPU,0.5.16,3.0,,2,8192", "m,fa3,hybrid,1,32768,1,GPU,0.5.16,2.0,0.2,2,8192"]
    written = "\n".join(table.sglang(list(csv.DictReader([head, *lines]))))
    assert "| 1 x 32k in chunks of 8k, 1 new | hybrid | 20.0% | 2.000 s | 1.50x | 2 |" in written
    assert "| stock | - | 3.000 s | - | 2 |" in written


@pytest.mark.usefixtures("without_kernel")
def test_hybrid_has_its_density_of_real_text_where_attention_is_even():
    tokens = 4096
    own = PrefillSettings.from_dict({**prefill_profile.settings_of("hybrid", tokens, 0.2), "dense_below": 0})
    even = torch.zeros(1, 2, tokens, 16)
    inputs = attention_inputs(even, even, even)
    selector, run = own.selector().for_inputs(inputs), own.run_options
    found = attend(inputs, selector, run, run.policy.plan(inputs, selector), statistics=("density",))
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


SMALL = LayerShape(num_heads=4, num_kv_heads=2, head_dim=16, v_head_dim=16, scale=0.25)


@pytest.mark.usefixtures("without_kernel")
@pytest.mark.parametrize("rows", [512, 2048])
def test_a_later_chunk_has_hybrid_s_density_of_text(rows):
    tokens = 6144 + rows
    chunk = chunk_rows.Chunk(rows, 6144, "cpu", SMALL)
    layer = chunk.layer(method="hybrid", gamma=0.1, min_coverage=0.0, min_budget=chunk_rows.budget(rows, tokens))
    key, value = chunk.keys_and_values()
    even = attention_inputs(torch.zeros(1, 4, rows, 16), torch.zeros_like(key)[None], value[None])
    selector = layer.selector.for_inputs(even)
    found = attend(even, selector, layer.run, layer.run.policy.plan(even, selector), statistics=("density",))
    assert found.stats is not None
    assert found.stats.density.mean().item() == pytest.approx(prefill_profile.own_density(tokens), abs=0.06)


@pytest.mark.attention
def test_a_later_chunk_is_measured_beside_a_kernel_that_computes_the_same():
    chunk = chunk_rows.Chunk(100, 300, "cpu", SMALL)
    key, value = chunk.keys_and_values()
    assert torch.equal(torch.cat([key, value], -1).transpose(0, 1)[300:], torch.cat([chunk.key, chunk.value], -1))
    inputs = (x[None] for x in (chunk.query.transpose(0, 1), key, value))
    mask = torch.ones(100, 400, dtype=torch.bool).tril(300)
    heads = {"attn_mask": mask, "scale": 0.25, "enable_gqa": True}
    expected = torch.nn.functional.scaled_dot_product_attention(*inputs, **heads)[0].transpose(0, 1)
    name, call = chunk_rows.stock_call(chunk, expected)
    assert name == "FlexAttention"
    torch.testing.assert_close(call(), expected)
    with pytest.raises(RuntimeError, match="FlexAttention computes another attention"):
        chunk_rows.stock_call(chunk, expected.roll(1, 0))


def test_the_least_rows_stand_between_two_measured_numbers():
    times = [(128, 16384, 1.0, 2.0), (512, 16384, 1.0, 0.8), (128, 65536, 1.0, 0.5), (512, 65536, 1.0, 0.4)]
    found = [dict(zip(("rows", "before", "stock", "plug_in"), each, strict=True)) for each in times]
    short, long = chunk_rows.least_rows(found)
    # 0.5x and 1.25x
    assert short.endswith("128 rows 0.50x, 512 rows 1.25x; even at about 384 rows")
    assert long.endswith("all gain")


@pytest.mark.attention
def test_one_call_for_several_prompts_gives_what_a_call_each_gives():
    own = PrefillSettings(gamma=0.7, block_size=32, min_budget=32, dense_below=0)
    lengths = (192, 64, 320)
    prompts = [attention_inputs(*(torch.randn(1, heads, length, 16) for heads in (4, 2, 2))).prepared() for length in lengths]
    kept = packed_call.selected(own.selector(), prompts)
    density = [(each.lists.kv_num_blocks + each.lists.full_kv_num_blocks).float().mean() for each in kept]
    assert density[2] < 5  # of 5.5 that are visible
    together = packed_call.packed(packed_call.in_one(prompts), kept, "cpu").split(lengths, 2)
    for ours, expected in zip(together, packed_call.separate(prompts, kept, "cpu"), strict=True):
        torch.testing.assert_close(ours, expected)
