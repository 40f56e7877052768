"""The answers of engines on a GPU, as committed, lie within the bounds that docs/serving.md explains."""

import pytest

from bench.rows import read_rows
from tests.repository import ROOT
from tests.vllm.agreement import rows as rows_of
from tests.vllm.bounds import FAULTS, SGLANG, VLLM, beyond

RESULTS = ROOT / "bench/results"
MASKS = read_rows(RESULTS / "agreement-adapter-cpu.jsonl")
ENGINES = {"nvidia-h200": VLLM, "sglang-nvidia-h200": SGLANG, "sglang-nvidia-h100": SGLANG}


@pytest.mark.parametrize("file", ENGINES)
def test_committed_rows_are_within_their_bounds(file):
    rows = read_rows(RESULTS / f"agreement-{file}.jsonl")
    found = {(row["compared"], row["asked"]): beyond(row, rows, ENGINES[file], MASKS) for row in rows}
    assert {name: why for name, why in found.items() if why is not None} == {}
    # kinds of rows that must be there
    compared = {name for name, _ in found}
    assert {"keep_all and stock", "triton and triton_stock", "sparse and adapter"} <= compared
    assert len(compared & FAULTS.keys()) == 2


def test_rows_beyond_their_bounds_are_found():
    rows = read_rows(RESULTS / "agreement-nvidia-h200.jsonl")
    wrong = {"keep_all and stock": "mean", "latent and latent_stock": "p99", "sparse and adapter": "mean"}
    for compared, name in wrong.items():
        row = next(each for each in rows if each["compared"] == compared)
        assert beyond({**row, name: 3.0}, rows, VLLM, MASKS).startswith(f"{name} 3.000 > ")
        fewer = {**row, "tokens_alike": row["tokens"] - 1}
        assert beyond(fewer, rows, VLLM, MASKS) is not None
    fault = next(each for each in rows if each["compared"] in FAULTS)
    assert "not by more than" in beyond({**fault, "most": 2.0}, rows, VLLM, MASKS)


def answer(token, *logprobs):
    return {"tokens": [token], "logprobs": [{"5": logprobs[-1]}], "prompt_logprobs": list(logprobs[:-1])}


def test_rows_compare_an_engine_s_chunks_with_whole_prompts_and_with_the_adapter():
    runs = {
        "latent_stock": {"whole": [answer(5, -1.0, -2.0)], "odd_chunks": [answer(5, -1.5, -2.0)]},
        "latent": {"whole": [answer(5, -1.0, -2.0)], "odd_chunks": [answer(5, -1.25, -2.0)]},
        "latent_sparse": {"whole": [answer(5, -3.0, -2.0)]},
        "adapter_latent": {"latent_sparse": {"whole": {"prompt_logprobs": [-3.5], "token": 5}}},
        "adapter_bfloat16_latent": {"latent_sparse": {"whole": {"prompt_logprobs": [-3.0], "token": 6}}},
    }
    found = {(row["compared"], row["asked"]): (row["most"], row["tokens_alike"]) for row in rows_of(runs)}
    assert found == {
        ("latent_stock in other chunks", "whole"): (0.5, 1),
        ("latent in chunks and latent_stock whole", "odd_chunks"): (0.25, 1),
        ("latent and latent_stock", "whole"): (0.0, 1),
        ("latent and latent_stock", "odd_chunks"): (0.25, 1),
        ("latent_sparse and latent_stock", "whole"): (2.0, 1),
        ("latent_sparse and adapter", "whole"): (0.5, 1),
        ("adapter in bfloat16 and float32, latent_sparse", "whole"): (0.5, 0),
    }
