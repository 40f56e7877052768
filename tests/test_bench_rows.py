"""``bench.rows`` and ``bench.speed.calls``: rows that survive a cut, and calls at a wanted density."""

from __future__ import annotations

import pytest
import torch

from bench.prompts.structured import structured_prompt
from bench.rows import Sheet, append_row, read_rows
from bench.speed import calls

COLUMNS = ("part", "tokens", "options", "value")


def sheet(path):
    return Sheet(path / "folder" / "rows.csv", COLUMNS, ("part", "tokens", "options"))


def test_a_row_is_there_once_it_is_added(tmp_path):
    first = sheet(tmp_path)
    assert not first.has(part="a", tokens=1)
    first.add(part="a", tokens=1, value=2.5)
    first.add(part='"b", c', options={"gamma": 0.9})
    for each in (first, sheet(tmp_path)):
        assert each.has(part="a", tokens=1, value=7) and each.has(part='"b", c', tokens=None, options={"gamma": 0.9})
        assert not each.has(part="a", tokens=2) and not each.has(part="a") and not each.has(part='"b", c')
    assert first.path.read_text().splitlines()[:2] == ["part,tokens,options,value", "a,1,,2.5"]


def test_a_row_that_was_cut_off_is_measured_again(tmp_path):
    first = sheet(tmp_path)
    first.add(part="a")
    whole = first.path.read_text()
    first.path.write_text(whole + "b,1")
    again = sheet(tmp_path)
    assert again.has(part="a") and not again.has(part="b", tokens=1)
    again.add(part="b", tokens=1)
    assert again.path.read_text() == whole + "b,1,,\n"
    path = tmp_path / "rows.jsonl"
    path.write_text('{"part": "a"}\n{"part": "b", "ti')
    append_row(path, {"part": "c"})
    assert read_rows(path) == [{"part": "a"}, {"part": "c"}]


def test_other_columns_are_refused(tmp_path):
    sheet(tmp_path).add(part="a")
    with pytest.raises(ValueError, match="must have the columns part; got part,tokens"):
        Sheet(tmp_path / "folder" / "rows.csv", ("part",), ("part",))
    with pytest.raises(ValueError, match="got parts"):
        sheet(tmp_path).add(parts="a")


@pytest.mark.parametrize("method", ["hybrid", "flexprefill"])
def test_the_knob_is_searched_until_the_mask_keeps_as_much(method):
    tensors = structured_prompt(2048, 0.2, num_heads=4, num_kv_heads=2, device="cpu", dtype=torch.float32)
    least = calls.density(tensors, method, {"block_size": 64, "gamma": 0.5})
    options, density = calls.at_density(tensors, method, (1 + least) / 2, block_size=64)
    assert density == calls.density(tensors, method, options)
    assert density == pytest.approx((1 + least) / 2, abs=0.03)
