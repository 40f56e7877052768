"""The benchmark of serving: tables, and the density that it sets."""

import csv
import json

import pytest

pytest.importorskip("transformers")

from bench.serving import table

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
