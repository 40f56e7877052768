"""The fidelity report beyond its first tables: errors at equal density and time, areas, rows by bed, figures by head."""

from __future__ import annotations

import json

import numpy as np
import pytest

pytest.importorskip("transformers")

from bench.fidelity import (
    compare,
    curves,
    glance,
    heads,
    measures,
    results,
    sections,
    statistics,
    times,
)
from bench.fidelity.measures import Measure

HYBRID = curves.CURVES["hybrid"]
TEXTS = ("test/prose/a-0", "test/prose/b-0", "test/python/c-0")


def on_curve(density, factor=1.0):
    """Figures of three texts whose error is factor * 0.1 / density."""
    return np.array([[density, factor * 0.1 / density]] * 3)


@pytest.fixture
def measure():
    figures = {f"hybrid:gamma={gamma:g}": on_curve(0.1 * (1 + number)) for number, gamma in enumerate(curves.GAMMAS)}
    figures["xattention:threshold=0.8"] = on_curve(0.2, 0.5)
    figures["xattention:threshold=0.9"] = on_curve(0.4, 2.0)
    return Measure("abs d", TEXTS, figures)


def test_error_at_a_density_is_between_the_settings():
    density, error = np.array([[0.1], [0.2], [0.4]]), np.array([[0.8], [0.2], [0.1]])
    assert statistics.error_at(np.array([0.2]), density, error) == pytest.approx([0.2])
    assert statistics.error_at(np.array([0.15]), density, error) == pytest.approx([0.4])
    assert statistics.error_at(np.array([0.15]), density, error, log=False) == pytest.approx([0.5])
    assert np.isnan(statistics.error_at(np.array([0.05]), density, error)).all()
    assert np.isnan(statistics.error_at(np.array([0.5]), density, error)).all()
    assert statistics.known_interval(np.array([1.0, np.nan])) == (-np.inf, np.inf)


def test_a_setting_is_compared_with_the_curve_at_its_own_density(measure):
    found = [compare.at_equal_density(measure, f"xattention:threshold={share}", HYBRID) for share in (0.8, 0.9)]
    better, worse = found
    assert better == pytest.approx(np.full(statistics.DRAWS + 1, 0.5))
    assert worse[0] == pytest.approx(2)
    assert compare.cell(measure, better) == "**0.50x [0.50, 0.50]**"
    assert compare.cell(measure, worse) == "2.00x [2.00, 2.00]"
    assert compare.at_equal_density(measure, "moa", HYBRID) is None
    difference = Measure("loss", TEXTS, measure.figures, ratio=False)
    assert compare.cell(difference, compare.at_equal_density(difference, "xattention:threshold=0.9", HYBRID)) == (
        "+.250 [+.250, +.250]"
    )


def test_an_option_is_compared_with_its_own_selection_not_with_itself(measure):
    figures = {**measure.figures, "hybrid:gamma=0.7,min_budget=0": on_curve(0.25, 3.0)}
    found = sections.ablations([Measure("abs d", TEXTS, figures)], results.Results())
    assert found == []  # no such line in the list of ablations
    figures["hybrid:gamma=0.9,min_budget=0"] = on_curve(0.25, 3.0)
    found = sections.ablations([Measure("abs d", TEXTS, figures)], results.Results())
    assert next(line for line in found if line.startswith("| hybrid")).startswith("| hybrid, gamma 0.9, floor 0 | .250 | 2.9")


def test_an_option_measured_with_an_older_rule_is_compared_with_that(measure):
    figures = {name: on_curve(each[0, 0], 2.0) if name.startswith("hybrid") else each for name, each in measure.figures.items()}
    figures |= {name.replace("hybrid", curves.BEFORE): measure.figures[name] for name in HYBRID}
    figures["hybrid:gamma=0.9,min_budget=0"] = on_curve(0.25, 3.0)
    both = Measure("abs d", TEXTS, figures)
    assert compare.at_equal_density(both, "hybrid:gamma=0.9,min_budget=0", HYBRID)[0] == pytest.approx(3, rel=0.05)
    assert compare.at_equal_density(both, "xattention:threshold=0.9", HYBRID)[0] == pytest.approx(1)


def test_areas_need_settings_on_both_sides(measure):
    assert np.isnan(compare.area(measure, curves.CURVES["xattention"])[0])
    assert compare.area(measure, HYBRID)[0] == pytest.approx(0.1 * np.log(0.3 / 0.18) / 0.12, rel=0.05)
    assert [line.split(" | ")[0] for line in compare.areas_table([measure])[3:-1]] == ["| hybrid"]


def test_time_is_mask_and_kernel(measure, tmp_path):
    rows = [
        {"tokens": 32768, "times": {"dense": {"wall_ms": 10.0}, "mask hybrid 0.9": {"wall_ms": 1.0}}},
        {"tokens": 32768, "method": "xattention", "times": {"dense": {"wall_ms": 10.0}, "mask xattention": {"wall_ms": 3.0}}},
        {
            **{"tokens": 32768, "method": "hip", "density": 0.25},
            "times": {
                "dense": {"wall_ms": 10.0, "graph_ms": 8.0},
                **{"mask hip": {"wall_ms": 2.0, "graph_ms": 1.0}, "call hip": {"wall_ms": 5.0, "graph_ms": 4.0}},
            },
        },
        {"tokens": 32768, "kernel": [[0.5, {"wall_ms": 5.5}], [0.1, {"wall_ms": 1.5}], [0.7, {"error": "E"}]]},
    ]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    length = times.read(path)[32768]
    assert length.law() == pytest.approx((0.5, 10.0))
    assert length.call("hybrid 0.9", np.array([0.3, 0.8])) == pytest.approx([4.5, np.nan], nan_ok=True)
    assert length.density_for("hybrid 0.9", 4.5) == pytest.approx(0.3)
    assert np.isnan(length.density_for("hybrid 0.9", 1.1))
    lines = times.lines(measure, path)
    # at 30% of dense hybrid has 2 ms for blocks, xattention none
    assert any(line.startswith("| hybrid | 1 (10.0%) | - | .707 at .150 | ") for line in lines)
    assert any(line.startswith("| XAttention | 3 (30.0%) | - | - | ") for line in lines)
    # whole calls, by their graphs; a method without a call has no row there
    assert [line for line in lines if line.startswith("| HiP-block | .250")] == ["| HiP-block | .250 | 1 (12.5%) | 4 (2.0x) |"]
    assert times.lines(measure, tmp_path / "none.jsonl") == []


def test_whole_calls_at_equal_error(measure, tmp_path):
    def call(density, size=128):
        return {"selection": "hybrid", "block_size": size, "gamma": 0.9, "density": density}

    def row(backend, calls, clock="wall_ms", **taken):
        timed = {name: {clock: milliseconds} for name, milliseconds in taken.items()}
        return {"tokens": 32768, "backend": backend, "calls": calls, "times": {"failed": {"error": "E"}, **timed}}

    of_64 = {"backend": "triton", "block_size": 64, "kernel": [[0.1, {"wall_ms": 2.5}], [0.5, {"wall_ms": 6.5}]]}
    rows = [
        {"tokens": 32768, "kernel": [[0.1, {"wall_ms": 1.5}], [0.5, {"wall_ms": 5.5}]]},
        {"tokens": 32768, **of_64},
        row("flash", {"b": call(0.25), "a": call(0.15), "c": call(0.2, 64), "failed": call(0.9)}, dense=10.0, a=2, b=4, c=1),
        # another run on a slower machine: shares of its own dense attention
        row("triton", {"a": call(0.15)}, dense=30.0, a=9.0),
        row("flash", {"a": call(0.15)}, "graph_ms", dense=1.0, a=1.0),
        {
            "tokens": 32768,
            "method": "hip",
            "peak_mb": 1234.4,
            "times": {"dense": {"wall_ms": 90.0}, "mask hip": {"wall_ms": 9.0}},
        },
    ]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    length = times.read(path)[32768]
    assert length.dense == 20.0 and length.masks == {"hip": 0.1}
    assert length.whole["hybrid", 128, "flash"] == [(0.15, 0.2), (0.25, 0.4)]
    assert times.memory({32768: length}) == ["MiB that masks of 32 heads take at 32k while they are made: HiP-block 1,234."]
    assert length.law("triton", 64) == pytest.approx((1.5, 10.0))
    density, error = measure.draws(HYBRID)
    target = float(np.exp(np.interp(0.2, density[:, 0], np.log(error[:, 0]))))
    table = times.whole_calls_table(measure, {32768: length}, (target, 1e-5))
    # a share of .3 of a dense attention of 20; one call alone tells nothing of another density
    assert [line.split(" | ")[:2] for line in table if "hybrid" in line] == [["| hybrid, FLASH", "6: 3.3x [3.3, 3.3]"]]
    assert table[3].endswith(" | - |") and len(table) == 5


def test_every_draw_is_sorted_by_its_own_densities():
    # on the second text the setting that is denser on average keeps less
    figures = {"a": np.array([[0.10, 0.9], [0.40, 0.4]]), "b": np.array([[0.50, 0.2], [0.20, 0.8]])}
    measure = Measure("abs d", ("one-0", "two-0"), figures)
    weights = np.array([[0.5, 0.5], [1.0, 0.0], [0.0, 1.0]])
    density, error = measure.draws(["b", "a"], weights)
    assert density == pytest.approx(np.array([[0.25, 0.10, 0.20], [0.35, 0.50, 0.40]]))
    assert error == pytest.approx(np.array([[0.65, 0.9, 0.8], [0.50, 0.2, 0.4]]))
    # between neighbours in each draw
    assert statistics.error_at(np.full(3, 0.3), density, error, log=False) == pytest.approx([0.575, 0.55, 0.6])


def test_rows_go_to_the_files_of_their_beds(tmp_path):
    by_head = {f"{name}_by_head": [[0.1, 0.2], [0.3, 0.4]] for name in ("density", "mass", "output_error")}
    attention = {
        "bed": "attention",
        "method": "hybrid:gamma=0.9",
        "tokens": 16384,
        "density": 0.2,
        "output_error": 0.1,
        **by_head,
    }
    made = [
        {"bed": "texts", "method": "m", "text": "t", "tokens": 16384, "density": 0.1, "dloss": 0.1, "absd": 0.2},
        {"bed": "texts", "method": "m", "text": "t", "tokens": 8192, "density": 0.3, "dloss": 0.1, "absd": 0.2},
        {"bed": "needles", "method": "m", "task": "16384/1", "density": 0.1, "right": 90, "n": 96},
        {"bed": "needles", "method": "m", "task": "16384/1", "density": 0.1, "right": 24, "n": 24},
        {**attention, "text": "t"},
        {**attention, "text": "u", "output_error_by_head": [[0.3, 0.2], [0.3, 0.4]]},
    ]
    (tmp_path / "run.jsonl").write_text("".join(json.dumps(row) + "\n" for row in made))
    path = tmp_path / "fidelity-x.jsonl"
    counts = results.add([tmp_path / "run.jsonl"], path)
    assert {each.name: count for each, count in counts.items()} == {
        "fidelity-x.jsonl": 2,
        "fidelity-texts-8192-x.jsonl": 1,
        "fidelity-attention-x.jsonl": 2,
    }
    found = results.read(path)
    assert found.texts == {"m": {"t": (0.1, 0.1, 0.2)}}
    assert found.needles == {"m": {"16384/1": (0.1, 90, 96)}}  # the row of more prompts stays
    assert set(measures.read_rows(results.file_of_bed("attention", path=path), "attention")["hybrid:gamma=0.9"]) == {"t", "u"}
    figures = heads.read(path)[heads.OURS]
    assert figures["texts"] == 2
    assert figures["output_error_by_head"] == [[0.2, 0.2], [0.3, 0.4]]


def test_heads_that_another_method_serves_better_are_counted():
    def figures(error, density):
        return {"output_error_by_head": error, "density_by_head": density}

    found = {
        heads.OURS: figures([[0.2, 0.3], [0.1, 0.4]], [[0.2, 0.2], [0.2, 0.2]]),
        heads.OTHERS[0]: figures([[0.1, 0.2], [0.2, 0.3]], [[0.1, 0.3], [0.2, 0.2]]),
    }
    assert heads.beaten(found) == [
        "- XAttention, threshold 0.9 errs less with no more blocks in 2 of 4 heads (most of them in layers 1, 0), "
        "more with no fewer in 1."
    ]
    assert heads.worst_table(found)[3] == "| 1, 1 | .400 at .200 | .300 at .200 |"


def test_needles_name_the_fewest_blocks_that_find_all():
    found = results.Results()
    for gamma, right, density in ((0.6, 23, 0.1), (0.8, 24, 0.2), (0.9, 24, 0.3)):
        found.needles[f"hybrid:gamma={gamma}"] = dict.fromkeys(compare.TASKS, (density, right, 24))
    found.needles["xattention:threshold=0.9"] = dict.fromkeys(compare.TASKS, (0.4, 1, 24))
    found.needles["xattention:threshold=0.8"] = {"16384/1": (0.1, 24, 24)}  # not asked the others
    assert [line for line in glance.needles(found) if line.startswith("| ")][1:] == [
        "| hybrid | .200 | 69 of 72 at .100 | 72 of 72 at .300 |",
        "| XAttention | none | 3 of 72 at .400 | 3 of 72 at .400 |",
    ]


def test_the_first_table_has_density_at_equal_error(measure):
    rows = [line for line in glance.equal_error([measure]) if line.startswith("| ")]
    assert rows[0] == "| method | abs d .300 | abs d .200 |"
    assert rows[1].startswith("| hybrid | ")


def test_methods_that_ran_out_of_time_are_left_out():
    def row(error):
        return {"density": 0.2, "output_error": error, "mass": 0.9}

    rows = {"hybrid:gamma=0.9": {text: row(0.1) for text in TEXTS}, "moa": {TEXTS[0]: row(0.2)}}
    output, lost = measures.of_attention(rows)
    assert list(output.figures) == list(lost.figures) == ["hybrid:gamma=0.9"]
    assert output.figures["hybrid:gamma=0.9"].tolist() == [[0.2, 0.1]] * 3
