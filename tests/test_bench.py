"""bench: rows on disk, workloads, the speed driver, reports."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("pandas")
pytest.importorskip("transformers")
pytest.importorskip("matplotlib")

import pandas as pd

import flexmask
from bench import intervals
from bench.prompts.structured import structured_prompt
from bench.report.__main__ import FILLED, filled
from bench.report.rows import Curves, newest, own_rows, shown
from bench.report.speed import speed_up
from bench.rows import Sheet, append_row, read_rows
from bench.speed import calls, flash_features, run
from tests.repository import ROOT

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


def test_structure_is_kept_more_where_more_is_asked_for():
    options, aware = {"gamma": 0.9, "min_budget": 64, "block_size": 32}, []
    prompts = [structured_prompt(2048, aim, block_size=32, **SMALL) for aim in (0.05, 0.2, 0.5)]
    densities = [calls.density(prompt, "flexprefill", options) for prompt in prompts]
    assert densities == sorted(densities) and densities[2] > densities[0] + 0.2
    for query, key, _ in prompts:
        aware.append(flexmask.flexprefill_mask(query, key, **options, return_stats=True)[1].is_query_aware.float().mean())
    assert min(aware) >= 0.25


@pytest.mark.parametrize("density", [0.1, 0.5])
def test_random_blocks_keep_the_share_asked_for(density):
    query, key, _ = structured_prompt(8192, 0.2, **SMALL)
    kept = calls.random_blocks.random_blocks_mask(query, key, density=density).to_dense()
    causal = torch.ones(64, 64, dtype=torch.bool).tril()
    share = kept[..., causal].float().mean((0, 2))
    # the first block and the diagonal are kept besides
    assert ((share > density) & (share < density + 0.08)).all()
    assert not torch.equal(kept[0, 0], kept[0, 1])
    chunk = calls.random_blocks.random_blocks_mask(query[:, :, 4096:], key, density=density).to_dense()
    assert torch.equal(chunk, kept[:, :, 32:])


def test_a_knob_is_searched_until_the_mask_keeps_as_much():
    options, kept = calls.at_density(TENSORS, "hybrid", 0.75, block_size=64, min_budget=128)
    assert kept == pytest.approx(0.75, abs=0.05)
    _, stats = flexmask.hybrid_mask(*TENSORS[:2], **options, return_stats=True)
    assert kept == calls.density(TENSORS, "hybrid", options) == pytest.approx(float(stats.density.mean()))


def test_every_kernel_of_ours_has_a_stage():
    folder = Path(flexmask.__file__).parent / "kernels"
    kernels = re.findall(r"^def (_\w+_kernel)\(", "".join(path.read_text() for path in folder.glob("*.py")), re.MULTILINE)
    assert len(kernels) > 5
    assert [name for name in kernels if run.stage_of(name) in (run.REST, "attention")] == []
    assert [run.stage_of(name) for name in ("triton_tem_fused_flex_attention", "triton_poi_fused_add")] == ["attention", run.REST]


@pytest.mark.skipif(torch.cuda.is_available(), reason="a run on the GPU is what make bench is for")
def test_the_speed_driver_stops_goes_on_and_keeps_errors(tmp_path, monkeypatch, capsys):
    gammas = {"hybrid": 0.8, "flexprefill": 0.8, "published": 7}
    made = [run.variant("mask", method, {"gamma": gamma}) for method, gamma in gammas.items()]
    monkeypatch.setattr(run, "latency_variants", lambda tokens: iter(made))
    monkeypatch.setattr(calls, "dense_calls", lambda tensors: {"dense SDPA": calls._sdpa(tensors)})
    arguments = ["latency", "--lengths", "512", "--out", str(tmp_path / "speed.csv")]
    assert run.main([*arguments, "--minutes", "-1"]) == 3
    assert "run the same command again" in capsys.readouterr().out
    assert run.main([*arguments, "--minutes", "60"]) == 0  # however busy the machine is
    rows = pd.read_csv(tmp_path / "speed.csv")
    found = list(zip(rows["what"], rows["method"].fillna(""), rows["measure"], strict=True))
    assert found == [
        ("dense", "", "eager_ms"),
        ("mask", "published", "error"),
        ("mask", "hybrid", "eager_ms"),
        ("mask", "flexprefill", "eager_ms"),
    ]
    timed = rows[(rows["measure"] == "eager_ms") & (rows["what"] == "mask")]
    assert (timed["fastest_value"] > 0).all() and (timed["fastest"] == "dense SDPA").all()
    assert ((timed["density"] > 0) & (timed["density"] <= 1)).all()
    assert "gamma" in rows["value"][1]
    before = (tmp_path / "speed.csv").read_text()
    assert run.main(arguments) == 0
    assert (tmp_path / "speed.csv").read_text() == before


def test_kinds_of_calls_by_flash_are_checked_in_processes_of_their_own():
    kinds = {flash_features.call_of(changes) for changes in flash_features.KINDS.values()}
    assert len(kinds) == len(flash_features.KINDS)
    if not torch.cuda.is_available():
        assert "CPU" in flash_features.checked({"head_dim": 32, "block_size": 16})["reason"]
    assert flash_features.checked({"head_dim": 32}, seconds=0.01)["reason"] == "no answer in 0 s"
    assert "its process ended with 1: ValueError" in flash_features.checked({"head_dims": 32})["reason"]


def test_times_by_flash_are_stated_over_the_fastest_dense_kernel_of_the_shape():
    def row(name, what, value):
        return {"name": name, "tokens": 32768, "density": 0.17, "what": what, "value": value}

    rows = [
        row("a", "dense x", 8.0),
        row("a", "dense y", "Error: no"),
        row("a", "hybrid flash", 2.0),
        row("b", "hybrid flash", 1.0),
    ]
    lines = [line.split() for line in flash_features.times_table(rows).splitlines()[1:]]
    assert lines == [
        ["a", "32,768", "17.0%", "dense", "x", "8.00", "ms", "1.00x"],
        ["a", "32,768", "17.0%", "dense", "y", "Error:", "no"],
        ["a", "32,768", "17.0%", "hybrid", "flash", "2.00", "ms", "4.00x"],
        ["b", "32,768", "17.0%", "hybrid", "flash", "1.00", "ms"],
    ]


@pytest.mark.attention
@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels of half precision differ by more")
def test_dense_kernels_agree():
    tensors = tuple(x[:, :, :512].contiguous() for x in TENSORS)
    outs = [call() for call in calls.dense_calls(tensors).values()]
    assert len(outs) == 2
    torch.testing.assert_close(outs[0], outs[1], atol=1e-4, rtol=0)


def test_a_curve_is_read_between_its_settings():
    settings = [(gamma, text) for gamma in (0.1, 0.2, 0.4) for text in ("book-0", "book-1", "code-0")]
    rows = pd.DataFrame(
        [
            {"method": "hybrid", "options": f'{{"gamma": {gamma}}}', "text": text, "density": gamma, "abs_d": 0.1 / gamma}
            for gamma, text in settings
        ]
        + [{"method": "hybrid", "options": "{}", "text": "book-0", "density": 0.15, "abs_d": 9.0}]  # of one text alone
    )
    curves = Curves(rows, "abs_d")
    assert curves.settings("hybrid")[:, 0].tolist() == pytest.approx([0.1, 0.2, 0.4])
    assert curves.error_at("hybrid", 0.3) == pytest.approx(np.sqrt(0.5 * 0.25))
    assert curves.interval_at("hybrid", 0.3) == pytest.approx([np.sqrt(0.125)] * 2)
    assert np.isnan(curves.error_at("hybrid", 0.05)) and np.isnan(curves.error_at("xattention", 0.2))
    densities, errors = np.array([0.4, 0.1, 0.2]), np.array([0.25, 1.0, 0.5])
    assert intervals.density_at(0.5, densities, errors) == pytest.approx(0.2)
    assert np.isnan(intervals.density_at(0.1, densities, errors)) and np.isnan(intervals.density_at(2.0, densities, errors))


def test_intervals_of_shares_and_means():
    assert intervals.wilson(40, 40) == pytest.approx((0.912, 1), abs=1e-3)
    low, high = intervals.of_mean([0.2, 0.4] * 50)
    assert 0.27 < low < 0.3 < high < 0.33 and high - low == pytest.approx(2 * 1.96 * 0.1 / 10, rel=0.1)
    # pieces of one book go together: two files are drawn, not three texts
    low, high = intervals.over_files(["a-0", "a-1", "b-0"], lambda weights: float(weights[2]))
    assert (low, high) == (0, 1)


def test_a_later_measurement_of_the_same_replaces_an_earlier_one():
    same = {"device": "GPU", "torch": "2", "part": "latency", "input": "structured", "tokens": 1, "what": "call", "measure": "ms"}
    rows = [
        {**same, "method": method, "wanted": wanted, "backend": "flash", "options": options, "density": density, "date": date}
        for method, wanted, options, density, date in [
            ("hybrid", 0.2, "{1}", 0.19, "2026-01-01"),
            ("hybrid", 0.2, "{2}", 0.21, "2026-01-02"),
            ("hybrid", 0.2, '{"block_size": 64}', 0.2, "2026-01-01"),
            ("hybrid, first rule", 0.2, "{1}", 0.19, "2026-01-01"),
            ("hybrid", np.nan, "{1}", 0.19, "2026-01-02"),
            ("hybrid", np.nan, "{1}", 0.19, "2026-01-01"),
            ("hybrid", np.nan, "{2}", 0.19, "2026-01-01"),
        ]
    ]
    assert newest(pd.DataFrame(rows)).index.tolist() == [1, 2, 3, 4, 6]


def test_hybrid_stands_for_its_newest_rule_with_enough_rows():
    def counted(**counts):
        return pd.DataFrame({"method": [name for name, count in counts.items() for _ in range(count)]})

    both = counted(**{"hybrid": 1, "hybrid, first rule": 3, "xattention": 2})
    assert [own_rows(both, "hybrid", least) for least in (1, 2, 9)] == ["hybrid", "hybrid, first rule", "hybrid"]
    assert shown(both) == ["hybrid", "xattention"]
    assert own_rows(both, "xattention", 9) == "xattention"


def test_a_speed_up_is_read_between_the_calls_measured():
    rows = pd.DataFrame({"density": [0.1, 0.3], "share": [0.2, 0.4]})
    assert speed_up(rows, 0.2) == pytest.approx(1 / 0.3)
    assert np.isnan(speed_up(rows, 0.4)) and np.isnan(speed_up(rows[:1], 0.1))


@pytest.mark.parametrize("name", FILLED)
def test_the_reports_hold_what_the_rows_say(name):
    text = (ROOT / name).read_text(encoding="utf-8")
    assert filled(text, ROOT / "bench" / "results") == text


def test_every_gain_and_error_of_the_page_links_to_its_row():
    text = (ROOT / "docs/should-i-use-it.md").read_text(encoding="utf-8")
    rows = [re.split(r"(?<!\\)\|", line)[1:-1] for line in text.splitlines() if line.startswith("|") and "---" not in line]
    figures = [cell for row in rows[1:] for cell in row if re.search(r"\d(\.\d+)?x|0\.\d\d", cell) and "vLLM" not in cell]
    assert len(figures) > 12
    for cell in figures:
        outside = re.sub(r"\[[^\]]*\]\([^)]*\)", "", cell)
        assert not re.search(r"\dx|0\.\d\d", outside), cell


def test_every_column_of_the_rows_is_explained():
    text = (ROOT / "bench/results/README.md").read_text(encoding="utf-8")
    explained = set(re.findall(r"`([^`]+)`", "".join(re.findall(r"^\| (`.*?) \|", text, re.MULTILINE))))
    for path in (ROOT / "bench/results").glob("*.csv"):
        columns = set(pd.read_csv(path, nrows=0).columns)
        by_position = {column for column in columns if re.fullmatch(r"(density|abs_d|d_loss) \d+-\d+k", column)}
        assert columns - by_position <= explained, path.name
    assert all(f"{path.name.partition('-')[0]}-" in text for path in (ROOT / "bench/results").glob("*.jsonl"))
