"""``bench.selections``: rows that survive a cut, and whole calls at a wanted density."""

from __future__ import annotations

import json

import pytest
import torch

from bench import selections
from bench.measure.rows import RowLog, code_digest, read_rows
from bench.measure.selected import Selected, density_of
from bench.prompts.structured import structured_prompt
from flexmask import flexprefill_mask

IDENTITY = ("part", "tokens")


@pytest.fixture(scope="module")
def tensors():
    return structured_prompt(2048, 0.2, num_heads=4, num_kv_heads=2, device="cpu", dtype=torch.float32)


def test_a_row_is_there_once_it_is_added(tmp_path):
    log = RowLog(tmp_path / "folder" / "rows.jsonl", IDENTITY)
    assert not log.has(part="a", tokens=1)
    log.add(part="a", tokens=1, wall_ms=2.5)
    log.add(part="b")
    again = RowLog(log.path, IDENTITY)
    assert again.rows == [{"part": "a", "tokens": 1, "wall_ms": 2.5}, {"part": "b"}]
    assert again.has(part="a", tokens=1, wall_ms=7) and again.has(part="b", tokens=None)
    assert not again.has(part="a", tokens=2) and not again.has(part="a")


def test_a_row_that_was_cut_off_is_measured_again(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"part": "a"}\n{"part": "b", "ti')
    log = RowLog(path, IDENTITY)
    assert log.has(part="a") and not log.has(part="b")
    log.add(part="b")
    assert path.read_text() == '{"part": "a"}\n{"part": "b"}\n'


def test_a_broken_row_in_the_middle_is_an_error(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"part": "a\n{"part": "b"}\n')
    with pytest.raises(json.JSONDecodeError):
        read_rows(path)


@pytest.mark.attention
def test_masks_by_group_keep_what_one_mask_keeps(tensors, monkeypatch):
    whole = Selected(tensors, "reference", 128)
    monkeypatch.setattr("bench.measure.selected.MOST_BYTES", 20 * 2**20)  # two of four heads
    parted = Selected(tensors, "reference", 128)
    assert (len(whole.masks(0.9)), len(parted.masks(0.9))) == (1, 2)
    assert parted.density(0.9) == whole.density(0.9)
    stats = flexprefill_mask(*tensors[:2], 0.9, selection="reference", return_stats=True)[1]
    assert whole.density(0.9) == pytest.approx(float(stats.density.mean()))
    torch.testing.assert_close(parted.call(0.9, "cpu")(), whole.call(0.9, "cpu")())


@pytest.mark.parametrize("selection", ["hybrid", "coverage", "reference"])
def test_gamma_is_searched_until_the_mask_keeps_as_much(tensors, selection):
    selected = Selected(tensors, selection, 64)
    least = selected.density(0.5)
    gamma, density = selected.gamma_for((1 + least) / 2)
    assert density == selected.density(gamma) == density_of(selected.masks(gamma))
    # the published code's has steps
    assert density == pytest.approx((1 + least) / 2, abs=0.1 if selection == "reference" else 0.03)
    # out of reach: the floor's
    assert selected.gamma_for(0.0)[1] == pytest.approx(least, abs=0.01)


def test_a_run_measures_what_is_missing(tmp_path, monkeypatch):
    monkeypatch.setattr(selections, "SHAPE", {"num_heads": 2, "num_kv_heads": 1, "device": "cpu", "dtype": torch.float32})
    path = tmp_path / "rows.jsonl"
    made = []

    def measure(prompt):
        made.append(prompt.tokens)
        if prompt.tokens == 512:
            raise ValueError("too short")
        return selections.masks(prompt, ("hybrid",), lambda methods: {name: {"wall_ms": 1.0} for name in methods})

    def run(stop=float("inf"), lengths=(256, 512)):
        selections.run(RowLog(path, ("tokens", "part", "code", "torch", "device")), [("masks", measure)], lengths, stop)

    run(stop=0)
    assert made == []
    run()
    run()
    assert made == [256, 512]
    first, second = read_rows(path)
    assert first["times"] == {"dense": {"wall_ms": 1.0}, "mask hybrid 0.9": {"wall_ms": 1.0}}
    assert second["error"] == "ValueError: too short" and first["code"] == code_digest()
    # other code is other rows
    path.write_text(path.read_text().replace(code_digest(), "another"))
    run(lengths=(256,))
    assert made == [256, 512, 256]


def test_calls_name_their_densities(monkeypatch):
    monkeypatch.setattr(selections, "SHAPE", {"num_heads": 2, "num_kv_heads": 1, "device": "cpu", "dtype": torch.float32})
    prompt = selections.Prompt(1024)
    near = prompt.selected("hybrid", 64).gamma_for(0.9)[1]
    monkeypatch.setattr(selections, "EQUAL", {"hybrid": (0.1, near)})

    def calls(*sizes):
        row = selections.calls(prompt, ("hybrid",), lambda made: {name: {} for name in made}, "cpu", sizes)
        assert set(row["times"]) == {"dense", *row["calls"]}
        return row["calls"]

    # the first is far below the floor of so short a prompt
    found = calls(64)
    assert list(found) == [f"call hybrid {near} blocks of 64"]
    assert found[f"call hybrid {near} blocks of 64"]["density"] == pytest.approx(near, abs=selections.FAR)
    # where none is near there is one, at the floor
    monkeypatch.setattr(selections, "EQUAL", {"hybrid": (0.1, 0.15)})
    assert list(calls(64, 128)) == ["call hybrid 0.1 blocks of 64", "call hybrid 0.1"]
