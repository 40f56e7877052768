"""The answers of engines on a GPU, as committed, lie within the bounds that docs/serving-measurements.md explains."""

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
