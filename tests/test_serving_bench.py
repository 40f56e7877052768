"""The benchmark of serving: its table, what it counts as compiled, and the density that it forces."""

from __future__ import annotations

import json

import pytest
import torch

from bench.serving import engine, table
from bench.serving.compilations import Compilations
from bench.serving.engine import serving_options
from bench.serving.first_token import parse, random_density
from flexmask.config import FlexPrefillConfig

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
    (tmp_path / "serving-x.jsonl").write_text("\n".join(map(json.dumps, ROWS)), encoding="utf-8")
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
    (tmp_path / "serving-x.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    table.main(["--results", str(tmp_path)])
    first, second = capsys.readouterr().out.split(": second")
    assert "| 2.00x |" in first
    assert "| 3.00x |" in second


def test_kernels_are_told_by_kind(tmp_path, capsys):
    names = {"nvjet_tst_128x256": 3000.0, "flash::FlashAttnFwdSm90": 1400.0, "void at::native::scan<int>": 60.0}
    kernels = {**names, "void at::native::direct_copy_kernel": 40.0, "triton_red_fused_add": 300.0}
    kernels |= {"vllm::reshape_and_cache_flash_kernel": 27.0, "at::native::unrolled_elementwise_kernel<direct_copy>": 31.0}
    profile = {**ENGINE, "prompt_tokens": 32768, "method": "sparse", "kernels_ms": kernels, "all_kernels_ms": 5000.0}
    memory = {**ROW, "method": "sparse", "seconds": 1.0, "peak_gb": 50.0, "profiled_gb": 32.5, "cache_gb": 18.0}
    (tmp_path / "serving-x.jsonl").write_text("\n".join(map(json.dumps, [profile, memory])), encoding="utf-8")
    table.main(["--results", str(tmp_path)])
    written = capsys.readouterr().out
    assert "| 32k | sparse | 1,400 ms | 3,000 ms | 67 ms | 91 ms | 442 ms | 5,000 ms |" in written
    assert "| 32.0 of 32.5 GB |" in written


def test_what_is_compiled_is_counted():
    called = torch.compile(lambda x: x + 1, backend="eager")
    with Compilations() as first:
        called(torch.ones(2))
    with Compilations() as second:
        called(torch.ones(2))
    assert (first.number, second.number) == (1, 0)


@pytest.mark.parametrize("rows", [4096, 1024])
def test_density_of_random_blocks_is_the_one_asked_for(rows):
    options = parse(["--model", "m", "--density", "0.5", "--device", "cpu", "--json", "out"])
    # the first block and the diagonal are kept besides
    assert 0.5 < random_density(4096, rows, 0.5, options) < 0.62


def test_options_are_what_a_user_would_write():
    given = ["--model", "m", "--json", "out", "--dense-below", "0"]
    assert serving_options(parse([*given, "--stock"])) is None
    assert serving_options(parse([*given, "--gamma", "0.8"])) == {"gamma": 0.8, "selection": "coverage", "dense_below": 0}
    forced = {"method": "random_blocks", "method_options": {"density": 0.1}, "max_mask_bytes": 2**31, "dense_below": 0}
    assert serving_options(parse([*given, "--density", "0.1", "0.3"])) == forced
    capped = {"gamma": 0.9, "min_budget": 512, "max_budget": 512, "tau": 0.0, "selection": "coverage", "dense_below": 0}
    assert serving_options(parse([*given, "--budget", "512"])) == capped
    hybrid = {"gamma": 0.9, "min_budget": 512, "selection": "hybrid", "dense_below": 0}
    options = parse([*given, "--budget", "512", "--selection", "hybrid"])
    assert serving_options(options) == hybrid
    assert engine.described(options) == "FlexPrefill, hybrid, 512 tokens"
    FlexPrefillConfig(**{name: value for name, value in hybrid.items() if name != "dense_below"})


def test_one_engine_serves_several_densities(monkeypatch):
    monkeypatch.setattr(engine, "_SHARE", {})
    monkeypatch.setattr("flexmask.block_masks.MASKS", {})
    engine.offer_random_blocks()
    from flexmask.block_masks import MASKS

    query = torch.zeros(1, 1, 2048, 16)

    def kept():
        mask = MASKS["random_blocks"](query, query, density=0.1)
        return int(mask.kv_num_blocks.sum() + mask.full_kv_num_blocks.sum())

    few = kept()
    engine.set_density(1.0)
    assert kept() == 16 * 17 // 2 > few
