"""The answers of engines on a GPU, as committed, lie within the bounds that docs/serving.md explains."""

import pytest

from bench.rows import read_rows
from tests.repository import ROOT
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
