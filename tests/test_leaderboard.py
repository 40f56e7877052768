"""The leaderboard: a row per method, its order, and dashes for what was not measured."""

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


@pytest.fixture
def measured(tmp_path):
    """Write rows of methods whose error is `scale` / density at the densities given; returns the folder."""
    lengths, retrieval, speed = [], [], []

    def write(method, knob, scale, densities, texts=("test/a-0", "test/b-0"), **changed):
        for number, density in enumerate(densities):
            for text in texts:
                row = {"model": "SmolLM2-135M", "yarn": 2, "text": text, "length": 16384, "method": method, "chunk": None}
                row |= {"options": json.dumps({knob: number}), "density": density, "abs_d": scale / density, "d_loss": 0.0}
                lengths.append(row | changed)

    def needles(method, right, density):
        for task, tokens in (("needle-1", 16384), ("needle-64", 16384), ("needle-1", 32768)):
            row = {"bed": "needles", "task": task, "tokens": tokens, "method": method, "first": 0, "n": 24, "density": density}
            options = "{}" if method == "dense" else json.dumps({"gamma": density})
            retrieval.append(row | {"options": options, "right": right, "answer_tokens": 4})

    def mask(method, part, value, density, measure="graph_ms"):
        row = {"part": part, "input": "structured", "tokens": 32768, "what": "mask", "method": method, "options": "{}"}
        speed.append(row | {"density": density, "measure": measure, "value": value})

    def save():
        for name, rows in (("lengths", lengths), ("retrieval", retrieval), ("speed", speed)):
            frame = pd.DataFrame(rows).assign(**({"chunk": None, "each": None} if name == "retrieval" else {}))
            frame.to_csv(tmp_path / f"{name}-here.csv", index=False)
        return tmp_path

    write.needles, write.mask, write.save = needles, mask, save
    return write


def test_methods_are_ordered_by_the_error_at_equal_density(measured):
    measured("xattention", "threshold", 0.02, (0.05, 0.4))
    measured("hybrid", "gamma", 0.01, (0.15, 0.4))
    measured("flexprefill", "gamma", 0.001, (0.25, 0.4))  # nothing at 20%
    measured("moa", "plan", 0.0001, (0.2,))  # one setting, no curve
    # none of these counts
    measured("hybrid, first rule", "gamma", 1e-6, (0.05, 0.4))
    for changed in ({"yarn": 8}, {"length": 32768}, {"chunk": 4096}, {"model": "another"}, {"text": "tune/a-0"}):
        measured("flash_prefill", "alpha", 1e-6, (0.05, 0.4), **changed)
    measured.needles("dense", 24, 1.0)
    measured.mask("hybrid", "latency", 0.5, 0.1)
    rows = cells(leaderboard.table(measured.save()))
    files = {path.stem for path in (ROOT / "block_masks").glob("[a-z]*.py")}
    assert set(rows) == files - {"causal"} and list(rows)[:3] == ["hybrid", "xattention", "flexprefill"]
    # the logarithm of the error is linear in the density
    at_20 = 0.01 / 0.15 * (0.15 / 0.4) ** (0.05 / 0.25)
    assert rows["hybrid"][:4] == ["-", f"{at_20:.2f} [{at_20:.2f}, {at_20:.2f}]", "0.04", "15% to 40%"]
    assert rows["flexprefill"][:4] == ["-", "-", "0.00", "25% to 40%"]
    assert rows["moa"][:4] == ["-", "-", "-", "20%"]
    assert rows["flash_prefill"] == ["-", "-", "-", "-", "-", "-", "-", "-"]


def test_needles_and_masks_name_their_density(measured):
    measured("hybrid", "gamma", 0.01, (0.15, 0.4))
    measured.needles("dense", 24, 1.0)
    for right, density in ((20, 0.1), (24, 0.2), (24, 0.3)):
        measured.needles("hybrid", right, density)
    measured.needles("flexprefill", 18, 0.4)
    measured.mask("hybrid", "latency", 0.5, 0.13)
    measured.mask("hybrid", "equal error", 0.7, 0.1)
    measured.mask("flexprefill", "equal error", 0.25, 0.11)
    measured.mask("published", "latency", 3.0, 0.1, measure="eager_ms")
    rows = cells(leaderboard.table(measured.save()))
    assert (rows["hybrid"][4], rows["flexprefill"][4], rows["xattention"][4]) == ("all at 20%", "75% at best", "-")
    # times at the defaults before those at equal error; plain calls are another measure
    assert rows["hybrid"][6:] == ["0.5 at 13%", "-"]
    assert rows["flexprefill"][6:] == ["0.25 at 11%", "-"] and rows["published"][6:] == ["-", "-"]


def test_without_rows_the_page_names_the_command(tmp_path):
    assert "Not measured yet" in "\n".join(leaderboard.table(tmp_path))
