"""The leaderboard: a row per method, its order, dashes."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("pandas")
pytest.importorskip("matplotlib")

import pandas as pd

from bench.report import leaderboard
from tests.repository import ROOT


def cells(lines):
    """The rows of a Markdown table by method."""
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| ")]
    return {row[0].split(" (")[0]: row[1:] for row in rows[1:]}


def test_methods_are_ordered_by_the_error_at_equal_density(tmp_path):
    rows = []

    def measured(method, knob, scale, densities, **changed):
        """Rows whose error is `scale` / density."""
        for number, density in enumerate(densities):
            for text in ("test/a-0", "test/b-0"):
                row = {"model": "SmolLM2-135M", "yarn": 2, "text": text, "length": 16384, "method": method, "chunk": None}
                row |= {"options": json.dumps({knob: number}), "density": density, "abs_d": scale / density, "d_loss": 0.0}
                rows.append(row | changed)

    measured("xattention", "threshold", 0.02, (0.05, 0.4))
    measured("hybrid", "gamma", 0.01, (0.15, 0.4))
    measured("flexprefill", "gamma", 0.001, (0.25, 0.4))  # nothing at 20%
    measured("moa", "plan", 0.0001, (0.2,))  # one setting, no curve
    # none of these counts
    measured("hybrid, first rule", "gamma", 1e-6, (0.05, 0.4))
    for changed in ({"yarn": 8}, {"length": 32768}, {"chunk": 4096}, {"model": "another"}, {"text": "tune/a-0"}):
        measured("flash_prefill", "alpha", 1e-6, (0.05, 0.4), **changed)
    common = {"n": 24, "first": 0, "chunk": None, "each": None, "answer_tokens": 4}
    needles = [
        {
            **common,
            "bed": "needles",
            "task": task,
            "tokens": tokens,
            "method": method,
            "options": own,
            "right": 24,
            "density": 0.2,
        }
        for method, own in (("dense", "{}"), ("hybrid", '{"gamma": 0.2}'))
        for task, tokens in (("needle-1", 16384), ("needle-64", 16384), ("needle-1", 32768))
    ]
    mask = {"part": "latency", "input": "structured", "tokens": 32768, "what": "mask", "method": "hybrid", "options": "{}"}
    mask |= {"density": 0.1, "measure": "graph_ms", "value": 0.5}
    for name, each in (("lengths", rows), ("retrieval", needles), ("speed", [mask])):
        pd.DataFrame(each).to_csv(tmp_path / f"{name}-here.csv", index=False)
    found = cells(leaderboard.table(tmp_path))
    files = {path.stem for path in (ROOT / "block_masks").glob("[a-z]*.py")}
    assert set(found) == files - {"causal"} and list(found)[:3] == ["hybrid", "xattention", "flexprefill"]
    # the logarithm of the error is linear in the density
    at_20 = 0.01 / 0.15 * (0.15 / 0.4) ** (0.05 / 0.25)
    assert found["hybrid"][:4] == ["-", f"{at_20:.2f} [{at_20:.2f}, {at_20:.2f}]", "0.04", "15% to 40%"]
    assert found["hybrid"][4] == "all at 20%" and found["hybrid"][6] == "0.5 at 10%"
    assert found["flexprefill"][:4] == ["-", "-", "0.00", "25% to 40%"]
    assert found["moa"][:4] == ["-", "-", "-", "20%"]
    assert found["flash_prefill"] == ["-", "-", "-", "-", "-", "-", "-", "-"]


def test_without_rows_the_page_names_the_command(tmp_path):
    assert "Not measured yet" in "\n".join(leaderboard.table(tmp_path))
