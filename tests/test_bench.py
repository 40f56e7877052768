"""bench: rows on disk, workloads, the speed driver."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("pandas")
pytest.importorskip("transformers")
pytest.importorskip("matplotlib")

import pandas as pd

import flexmask
from bench.prompts.structured import structured_prompt
from bench.rows import Sheet, append_row, read_rows
from bench.speed import calls, model

SMALL: Any = {"num_heads": 8, "num_kv_heads": 2, "device": "cpu", "dtype": torch.float32}
TENSORS = structured_prompt(2048, 0.2, **SMALL)


def test_rows_of_a_sheet_are_there_once_they_are_added(tmp_path):
    columns = ("method", "options", "tokens", "value")
    sheet = Sheet(tmp_path / "folder" / "rows.csv", columns, columns[:3])
    row = {"method": "a, b", "options": {"gamma": 0.9}, "tokens": 16384}
    assert not sheet.has(**row)
    sheet.add(**row, value=1 / 3)
    again = Sheet(sheet.path, columns, columns[:3])
    assert again.has(**row, value=7) and not again.has(**{**row, "tokens": 8192}) and not again.has(method="a, b")
    found = pd.read_csv(sheet.path)
    assert found.to_dict("records") == [{**row, "options": '{"gamma": 0.9}', "value": 0.333333}]
    with pytest.raises(ValueError, match="columns method, options, tokens, value; got other"):
        sheet.add(other=1)
    with pytest.raises(ValueError, match="must have the columns method; got method,options"):
        Sheet(sheet.path, ("method",), ("method",))


def test_a_row_that_was_cut_off_is_measured_again(tmp_path):
    (tmp_path / "rows.csv").write_text("part,value\na,1\nb")
    sheet = Sheet(tmp_path / "rows.csv", ("part", "value"), ("part",))
    assert sheet.has(part="a") and not sheet.has(part="b")
    sheet.add(part="b", value=2)
    assert sheet.path.read_text() == "part,value\na,1\nb,2\n"
    path = tmp_path / "rows.jsonl"
    path.write_text('{"part": "a"}\n{"part": "b", "ti')
    assert read_rows(path) == [{"part": "a"}]
    append_row(path, {"part": "b"})
    assert path.read_text() == '{"part": "a"}\n{"part": "b"}\n'


def test_a_knob_is_searched_until_the_mask_keeps_as_much():
    options, kept = calls.at_density(TENSORS, "hybrid", 0.75, block_size=64, min_budget=128)
    assert kept == pytest.approx(0.75, abs=0.05)
    _, stats = flexmask.hybrid_mask(*TENSORS[:2], **options, return_stats=True)
    assert kept == calls.density(TENSORS, "hybrid", options) == pytest.approx(float(stats.density.mean()))


def test_gpu_time_is_told_apart_by_the_names_of_kernels():
    folder = Path(flexmask.__file__).parent / "kernels"
    kernels = re.findall(r"^def (_\w+_kernel)\(", "".join(path.read_text() for path in folder.glob("*.py")), re.MULTILINE)
    assert len(kernels) > 5 and {model.part_of(name) for name in kernels} == {"mask"}
    others = ("triton_tem_fused_flex_attention", "triton_poi_fused_add", "_ZN2at6native13reduce_kernelE")
    assert [model.part_of(name) for name in others] == ["attention", "rest", "rest"]


@pytest.mark.attention
@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels of half precision differ by more")
def test_dense_kernels_agree():
    tensors = tuple(x[:, :, :512].contiguous() for x in TENSORS)
    outs = [call() for call in calls.dense_calls(tensors).values()]
    assert len(outs) == 2
    torch.testing.assert_close(outs[0], outs[1], atol=1e-4, rtol=0)
