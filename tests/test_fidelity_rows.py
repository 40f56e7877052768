"""The texts of the fidelity bed, its statistics and the rows that it keeps."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

pytest.importorskip("transformers")

from bench.fidelity import methods, results, statistics, table, texts
from bench.fidelity.curves import BEFORE
from bench.fidelity.run import read_methods

FOLDER = results.PATH.parents[1] / "fidelity"


def test_texts_are_long_enough_and_apart():
    chosen = {use: texts.load(use) for use in ("tune", "test")}
    assert [len(each) for each in chosen.values()] == [6, 12]
    assert all(len(ids) == texts.NUM_TOKENS for each in chosen.values() for ids in each.values())
    files = {use: {statistics.file_of(name).partition("/")[2] for name in each} for use, each in chosen.items()}
    assert len(files["test"]) == 8
    assert not files["tune"] & files["test"]


def test_density_at_equal_error_follows_the_curve():
    density = np.array([[0.1], [0.2], [0.4]])
    error = np.array([[0.4], [0.2], [0.1]])
    assert statistics.density_at(0.2, density, error) == pytest.approx([0.2])
    assert statistics.density_at(math.sqrt(0.2 * 0.1), density, error) == pytest.approx([0.3])
    assert statistics.density_at(0.5, density, error) == [-np.inf]
    assert statistics.density_at(0.05, density, error) == [np.inf]


def test_bootstrap_draws_files_not_texts():
    names = [f"test/prose/book-{i}" for i in range(3)] + ["test/python/a-0", "test/python/b-0"]
    weights = statistics.bootstrap_weights(names, 500)
    assert weights[0] == pytest.approx([0.2] * 5)
    assert weights.sum(1) == pytest.approx(np.ones(501))
    assert (weights[:, 0] == weights[:, 1]).all() and (weights[:, 0] == weights[:, 2]).all()
    assert {round(3 * float(w[0])) for w in weights} == {0, 1, 2, 3} or (weights[:, 0] == 0).any()
    assert (statistics.bootstrap_weights(names, 500) == weights).all()


def test_intervals_of_known_samples():
    low, high = statistics.interval(np.arange(1001.0))
    assert (low, high) == (25, 975)
    assert statistics.wilson(24, 24) == pytest.approx((0.862, 1.0), abs=1e-3)
    assert statistics.wilson(12, 24) == pytest.approx((0.314, 0.686), abs=1e-3)
    unknown = np.full(1001, -np.inf)
    assert statistics.ratio(unknown, unknown) == (-np.inf, np.inf)
    assert statistics.ratio(np.full(1001, 0.3), np.full(1001, 0.2)) == pytest.approx((1.5, 1.5))
    assert statistics.ratio(np.full(1001, 0.3), unknown) == (np.inf, np.inf)  # the base needs less than was measured


def test_report_is_the_committed_one(tmp_path):
    table.main(["--markdown", "--out", str(tmp_path / "report.md")])
    assert (tmp_path / "report.md").read_text(encoding="utf-8") == table.OUT.read_text(encoding="utf-8")


def test_rows_of_a_run_replace_older_ones(tmp_path):
    old = {"bed": "needles", "method": "hybrid:gamma=0.9", "task": "16384/1", "density": 0.5, "right": 1, "n": 24}
    new = {**old, "density": 0.123456789, "right": 24, "seconds": 1.0}
    (tmp_path / "all.jsonl").write_text(json.dumps(old) + "\n")
    (tmp_path / "run.jsonl").write_text('{"bed": "machine", "device": "x"}\n' + json.dumps(new) + "\n")
    assert results.add([tmp_path / "run.jsonl"], tmp_path / "all.jsonl") == {tmp_path / "all.jsonl": 1}
    assert results.read(tmp_path / "all.jsonl").needles == {"hybrid:gamma=0.9": {"16384/1": (0.12346, 24, 24)}}


def test_every_committed_row_can_be_measured_again():
    found = results.read()
    listed = {"dense"}.union(*(read_methods(path) for path in FOLDER.glob("methods_*.txt")))
    by_tuned = {f"{how}gamma {gamma:g}" for how in ("", "tuned to ", "tuned by loss to ") for gamma in (0.8, 0.9, 0.95)}
    today = {name for name in {*found.texts, *found.needles} if not name.startswith(f"{BEFORE}:")}  # no code has that rule
    assert today <= listed | by_tuned
    for name in listed - {"dense"}:
        methods.parse(name)
