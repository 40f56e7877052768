"""The benchmark's calibrated inputs, its results file and its report; a short end-to-end run on the CPU."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

pytest.importorskip("matplotlib")

import flexmask
from bench.cpu_break_even import break_even as cpu_break_even
from bench.cpu_break_even import main as measure_cpu
from bench.measure.compare import compare
from bench.measure.compile_times import constant_sizes
from bench.measure.results import Results
from bench.measure.resumable import ResumableRun
from bench.measure.stages import GLUE, grouped, stage_of
from bench.measure.variants import Variant, mask_variants
from bench.prompts import calibration, structured
from bench.prompts.calibration import calibrated_prompt, landed, measured_density
from bench.prompts.prompt import Prompt, floor_of, named_density
from bench.prompts.structured import ALL_TOPICS, structured_prompt
from bench.report import main as write_report
from bench.reporting import plots
from bench.reporting.break_even import break_even
from bench.reporting.tables import text_table
from bench.reporting.targets import verdicts
from flexmask import search

SMALL = {"num_heads": 8, "num_kv_heads": 2, "device": "cpu", "dtype": torch.float32, "block_size": 32}
CALLS = {"block_size": 32, "min_budget": 64}


@pytest.mark.parametrize(("tokens", "density"), [(1024, 0.4), (2048, 0.2), (2048, 0.3), (4096, 0.15)])
def test_calibrated_mixture_lands_on_its_density(tokens, density):
    found = calibrated_prompt(tokens, density, min_budget=64, **SMALL)
    assert landed(found.density, density)
    assert found.calls <= 6
    assert found.query_aware >= 0.25
    again = calibrated_prompt(tokens, density, min_budget=64, aim=found.aim, **SMALL)
    assert again.density == found.density
    assert all(torch.equal(a, b) for a, b in zip(again.tensors, found.tensors, strict=True))


def test_calibration_does_not_land_below_the_floor():
    found = calibrated_prompt(1024, 0.1, min_budget=512, **SMALL)
    assert found.density > 0.5
    assert not landed(found.density, 0.1)


def test_topics_alone_are_query_aware_everywhere():
    query, key, _ = structured_prompt(2048, 0.3, recipes=ALL_TOPICS, **SMALL)
    assert measured_density(query, key, 0.9, **CALLS)[1] == 1


def test_more_is_kept_where_more_is_asked_for():
    densities = [measured_density(*structured_prompt(2048, aim, **SMALL)[:2], 0.9, **CALLS)[0] for aim in (0.05, 0.2, 0.5)]
    assert densities == sorted(densities)
    assert densities[2] > densities[0] + 0.2


def test_long_prompts_are_measured_head_by_head(monkeypatch):
    query, key, _ = structured_prompt(2048, 0.2, **SMALL)
    whole = measured_density(query, key, 0.9, **CALLS)
    monkeypatch.setattr(calibration, "MOST_BYTES", 0)
    assert measured_density(query, key, 0.9, **CALLS) == pytest.approx(whole, rel=1e-6)


def test_prompt_longer_than_a_chunk_is_one_prompt(monkeypatch):
    monkeypatch.setattr(structured, "CHUNK", 4096)
    length = 4096 + 1000
    shape = SMALL | {"num_heads": 1, "num_kv_heads": 1}
    query, key, value = structured_prompt(length, 0.2, recipes=("bands",), **shape)
    assert query.shape == key.shape == value.shape == (1, 1, length, 128)
    # a row looks most at its own position among the keys that are not at its band's distance, also in the second chunk
    scores = query[0, 0, -500] @ key[0, 0, -700:-300].T
    assert abs(int(scores.argmax()) - 200) < 64


def test_results_are_kept_by_key_and_replaced(tmp_path):
    key = {"input": "mixture", "tokens": 512, "named_density": None, "aim": 0.2, "gamma": 0.9, "min_budget": 64, "method": "mask"}
    results = Results(tmp_path)
    assert results.missing("latency", **key)
    results.add("latency", key | {"wall_ms": 2.0})
    assert not results.missing("latency", **key)
    assert results.missing("latency", **key | {"gamma": 0.95})
    assert results.missing("long", **key)
    assert not Results(tmp_path).missing("latency", **key)
    again = Results(tmp_path, again=True)
    assert again.missing("latency", **key)
    again.add("latency", key | {"wall_ms": 3.0})
    assert not again.missing("latency", **key)
    assert [row["wall_ms"] for row in Results(tmp_path).parts["latency"]] == [3.0]
    assert not list(tmp_path.glob("*.tmp"))


def test_results_of_another_torch_are_measured_again(tmp_path, monkeypatch):
    key = {"input": "mixture", "tokens": 512, "named_density": 0.2, "aim": None, "gamma": 0.9, "min_budget": 64, "method": "mask"}
    Results(tmp_path).add("latency", key)
    monkeypatch.setattr(torch, "__version__", "9.0")
    assert Results(tmp_path).missing("latency", **key)


def test_kernels_are_grouped_by_stage():
    call = [("_means_kernel", 10.0), ("_block_sums_kernel", 30.0), ("_pattern_kernel", 5.0), ("_means_kernel", 20.0)]
    call += [("_pooled_map_kernel", 40.0), ("_lists_kernel", 7.0), ("triton_poi_fused_0", 1.0), ("flash_fwd_kernel", 100.0)]
    stages, glue = grouped([call, call])
    wanted = {"representative scores": 30, "pattern": 15, "index": 60, "emission": 7, "attention": 100, "glue": 1}
    assert stages == pytest.approx({name: value / 1e3 for name, value in wanted.items()})
    assert list(glue) == ["triton_poi_fused_0"]


def test_every_kernel_of_ours_has_a_stage():
    folder = Path(flexmask.__file__).parent / "kernels"
    sources = "".join(path.read_text() for path in folder.glob("*.py"))
    kernels = re.findall(r"^def (_\w+_kernel)\(", sources, re.MULTILINE)
    assert len(kernels) > 5
    assert [name for name in kernels if stage_of(name, 0) == GLUE] == []


def test_picture_of_too_many_lines_is_refused(tmp_path):
    lines = {method: [(1024.0, 1.0), (2048.0, 2.0)] for method in plots.STYLES}
    with pytest.raises(ValueError, match=f"at most {plots.MOST_LINES} lines; got {len(lines)}"):
        plots.over_lengths(lines, {}, tmp_path / "out.png", "", ("", ""))


def test_text_table_aligns_columns():
    assert text_table([("", "ms", "note"), ("mask", "1.5", "x")], "<><") == "        ms   note\nmask   1.5   x"


@pytest.mark.parametrize(
    ("points", "said"),
    [
        ([], "-"),
        ([(0.2, 2.0), (0.6, 0.5)], "0.33"),
        ([(0.2, 2.0), (0.6, 1.5)], "above 0.60"),
        ([(0.6, 0.5), (0.2, 0.8)], "below 0.20"),
    ],
)
def test_break_even_is_interpolated_in_time(points, said):
    assert break_even(points) == said


def _row(tokens, method, **fields):
    gamma = fields.pop("gamma", 0.9)
    floor = None if gamma is None else floor_of(tokens)
    row = {"device": "NVIDIA H200", "torch": "2.11.0", "date": "2026-01-02", "input": "mixture", "tokens": tokens}
    named = {"named_density": named_density(tokens), "aim": None}
    return row | named | {"gamma": gamma, "min_budget": floor, "method": method, "density": named_density(tokens)} | fields


def _synthetic():
    latency, memory, breakeven = [], [], []
    for tokens, dense in ((8192, 0.9), (32768, 14.0), (131072, 240.0)):
        latency.append(_row(tokens, "dense cuDNN", gamma=None, wall_ms=dense, graph_ms=dense, ratio=1.0, graph_ratio=1.0))
        latency.append(_row(tokens, "mask", wall_ms=0.5, graph_ms=0.1, ratio=dense / 0.5, graph_ratio=dense / 0.1))
        for gamma in (0.85, 0.9, 0.95):
            times = {"wall_ms": dense / 5, "graph_ms": dense / 6, "ratio": 5.0, "graph_ratio": 6.0}
            latency.append(_row(tokens, "call flash", gamma=gamma, **times))
        latency.append(_row(tokens, "kernel flash", wall_ms=dense / 6, ratio=6.0))
        latency.append(_row(tokens, "call triton", error="RuntimeError: planted"))
        memory.append(_row(tokens, "call flash", extra_mb=tokens / 128, peak_mb=tokens / 64, result_mb=tokens / 128))
        for density in (0.1, 0.3, 0.6):
            breakeven.append(
                _row(tokens, "call flash", gamma=0.95, density=density, ratio=0.4 / density, graph_ratio=0.5 / density)
            )
        breakeven.append(_row(tokens, "call flash", gamma=0.95, input="retriever", named_density=None, density=0.5, ratio=1.5))
    kernel = _row(131072, "kernel flash", ratio=10.5, density=0.1)
    latency.append(kernel | {"named_density": 0.1})
    stages = {"pattern": 0.1, "index": 0.2, "attention": 2.0, "glue": 0.05}
    stage = _row(32768, "call flash", stages_ms=stages, glue_kernels_ms={"fill": 0.05}, kernels=20, kernel_ms=2.35, wall_ms=2.5)
    steady = [{"tokens": 2000, "any_length_ms": 0.5, "one_length_ms": 0.4}]
    compiled = _row(131072, "call flash", lengths=[1024, 2000], first_s=[20.0, 0.1], graphs=[2, 2], total_s=20.1, steady=steady)
    inputs = [
        _row(8192, "calibration", query_aware=0.31, density=0.205),
        _row(32768, "calibration", query_aware=0.2, density=0.3),
    ]
    long = [_row(524288, "call flash", wall_ms=400.0, ratio=9.0)]
    parts = {"latency": latency, "memory": memory, "breakeven": breakeven, "stages": [stage], "compile": [compiled]}
    return parts | {"inputs": inputs, "long": long}


def test_report_states_targets_and_quotes_the_published_code(tmp_path, monkeypatch):
    drawn, draw = [], plots._draw
    monkeypatch.setattr(plots, "_draw", lambda axes, lines: drawn.append(list(lines)) or draw(axes, lines))
    folder = tmp_path / "results"
    folder.mkdir()
    (folder / "nvidia-h200.json").write_text(json.dumps({"device": "NVIDIA H200", "parts": _synthetic()}))
    write_report(["--results", str(folder), "--out", str(tmp_path / "REPORT.md")])
    text = (tmp_path / "REPORT.md").read_text()
    for name in ("latency", "stages", "memory", "compile", "kernels", "break-even"):
        assert f"(results/nvidia-h200-{name}.png)" in text
        assert (folder / f"nvidia-h200-{name}.png").stat().st_size > 1000
    assert "32k to 128k: 2.05" in text  # the growth of dense attention's time
    assert max(len(styles) for styles in drawn) > 3
    for styles in drawn:  # in grey, markers and line styles tell them apart
        assert len({(style.line, style.marker) for style in styles}) == len(styles)
    assert "published code, quoted" in text
    assert "planted" in text
    assert "**no**" in text
    assert "under a quarter" in text


def test_targets_are_met_or_missed():
    by_name = {verdict.target: verdict for verdict in verdicts(_synthetic())}
    assert by_name["mask / dense, 8k"].met is True
    assert by_name["mask / dense, 8k"].measured == "11.11%"
    assert by_name["mask / dense, 32k"].met is False
    assert by_name["dense / whole call, 8k, density 0.2"].measured == "6.00x"
    assert by_name["dense / whole call, 128k, density 0.15"].met is False
    assert by_name["memory beyond q, k, v and output, 8k"].met is True
    assert by_name["memory beyond q, k, v and output, 128k"].met is False
    assert by_name["memory beyond q, k, v and output, 512k"].met is None
    assert next(verdict for name, verdict in by_name.items() if name.startswith("kernel")).met is True


def _planted(tensors):
    raise RuntimeError("planted")


@pytest.mark.skipif(torch.cuda.is_available(), reason="a run on the GPU is what make bench is for")
def test_comparison_stops_goes_on_and_keeps_errors(tmp_path):
    prompt = Prompt("mixture", 512, 64, aim=0.2)
    variants = [*mask_variants((0.8, 0.9), 64), Variant("planted", _planted)]
    out_of_time = ResumableRun("latency", Results(tmp_path), limit=-1.0)
    compare(out_of_time, prompt, variants)
    assert out_of_time.left == 3
    assert not list(tmp_path.iterdir())

    compare(ResumableRun("latency", Results(tmp_path), limit=600.0), prompt, variants[1:])
    compare(ResumableRun("latency", Results(tmp_path), limit=600.0), prompt, variants)
    rows = {(row["method"], row["gamma"]): row for row in Results(tmp_path).parts["latency"]}
    assert list(rows) == [("mask", 0.9), ("planted", None), ("mask", 0.8)]
    assert rows["planted", None]["error"] == "RuntimeError: planted"
    for gamma in (0.8, 0.9):
        row = rows["mask", gamma]
        assert row["ratio"] == pytest.approx(row["dense_ms"] / row["wall_ms"])
        assert (row["num_heads"], row["num_kv_heads"], row["head_dim"], row["dtype"]) == (8, 2, 128, "float32")
    assert 0 < rows["mask", 0.8]["density"] <= rows["mask", 0.9]["density"] <= 1

    complete = ResumableRun("latency", Results(tmp_path), limit=-1.0)
    compare(complete, prompt, [Variant(variant.method, _planted, variant.gamma, variant.min_budget) for variant in variants])
    assert complete.left == 0


@pytest.mark.attention
@pytest.mark.skipif(torch.cuda.is_available(), reason="a run on the GPU is what make bench is for")
@pytest.mark.filterwarnings("default")
def test_latency_part_runs_stops_and_goes_on(tmp_path, capsys):
    from bench.parts import main

    arguments = ["latency", "--lengths", "256,512", "--results", str(tmp_path)]
    assert main([*arguments, "--minutes", "-1"]) > 0
    assert "run the same command again" in capsys.readouterr().out
    # sizes that change are symbolic from the first compilation on, which halves the number of compilations
    with torch._dynamo.config.patch(assume_static_by_default=False):
        assert main([*arguments, "--minutes", "60"]) == 0  # however busy the machine is
    (path,) = tmp_path.glob("*.json")
    rows = json.loads(path.read_text())["parts"]["latency"]
    assert not [row for row in rows if "error" in row]
    assert {"dense SDPA", "mask", "call cpu", "kernel cpu"} <= {row["method"] for row in rows}
    assert all(row["ratio"] == pytest.approx(row["dense_ms"] / row["wall_ms"]) for row in rows)
    before = path.read_text()
    capsys.readouterr()
    assert main(arguments) == 0
    assert "input:" not in capsys.readouterr().out
    assert path.read_text() == before
    write_report(["--results", str(tmp_path), "--out", str(tmp_path / "REPORT.md")])
    assert "FlexPrefill cpu, gamma 0.9" in (tmp_path / "REPORT.md").read_text()


def test_sizes_are_taken_as_constants_only_within():
    tensor, before = torch.zeros(3, 4), search.with_dynamic
    with constant_sizes():
        assert not hasattr(search.with_dynamic(tensor, 1), "_dynamo_weak_dynamic_indices")
    assert search.with_dynamic is before
    assert hasattr(before(tensor, 1), "_dynamo_weak_dynamic_indices")


def test_break_even_of_a_cpu_is_interpolated():
    assert cpu_break_even((0.4, 0.6, 0.8), (0.7, 0.9, 1.3)) == pytest.approx(0.65)
    assert cpu_break_even((0.4, 0.6), (0.7, 0.9)) is None


def test_cpu_break_even_prints_a_row_for_each_shape(capsys):
    measure_cpu(["--lengths", "512", "--head-dims", "32", "--dtypes", "float32", "--rounds", "1"])
    row = capsys.readouterr().out.splitlines()[-1].split("   ")
    assert row[0] == "512 tokens, head_dim 32, float32"
