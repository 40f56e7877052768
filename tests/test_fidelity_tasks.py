"""The report on RULER's tasks: scores, rounds of prompts, differences prompt by prompt."""

from __future__ import annotations

import json

import numpy as np
import pytest

pytest.importorskip("transformers")

from bench.fidelity import (
    paired,
    results,
    ruler_tasks,
    statistics,
    tasks,
)


def test_tasks_are_scored_where_dense_attention_solves_them(tmp_path):
    def row(method, task, right, parts, density=1.0):
        return {"bed": "tasks", "method": method, "task": task, "right": right, "n": 20, "parts": parts, "density": density}

    sparse = "hybrid:gamma=0.9"
    rows = [row("dense", "single/4096", 20, 1.0), row("dense", "tracking/4096", 15, 0.9), row("dense", "common/4096", 2, 0.5)]
    rows += [row("dense", "facts/4096", 20, 1.0), row(sparse, "facts/4096", 20, 1.0, 0.2)]  # no lookup of a value
    rows += [
        row(sparse, "single/4096", 19, 0.95, 0.1),
        row(sparse, "tracking/4096", 10, 0.85, 0.3),
        row(sparse, "common/4096", 0, 0),
    ]
    rows += [row("causal", "single/4096", 20, 1.0)]  # ran on one task alone: no average
    raw = tmp_path / "raw.jsonl"
    raw.write_text("".join(json.dumps(each) + "\n" for each in rows))
    path = tmp_path / "fidelity-gpu.jsonl"
    counts = results.add([raw], path)
    assert counts == {tmp_path / "fidelity-tasks-gpu.jsonl": len(rows)}
    found = [line for line in tasks.main_table(path) if line.startswith("| ")]

    def averaged(name, scores, density):
        mean = sum(scores) / len(scores)
        low, high = (100 * end for end in statistics.wilson(mean * 20 * len(scores), 20 * len(scores)))
        return f"| {name} | {100 * mean:.1f} [{low:.1f}, {high:.1f}] at {density} |"

    assert found == [
        "| method | 4k, 3 tasks |",
        averaged("dense", (1, 0.9, 1), "1.000"),
        averaged("hybrid, gamma 0.9", (0.95, 0.85, 1), ".200"),
        "| method | 4k, 2 tasks |",
        averaged("dense", (1, 0.9), "1.000"),
        averaged("hybrid, gamma 0.9", (0.95, 0.85), ".200"),
    ]
    by_task = [line for line in tasks.details(path) if line.startswith("| ")]
    assert by_task[1].endswith("| 19 of 20 [.764, .991]; 95.0 at .100 |")
    assert by_task[3].startswith("| common | 4k | 2 of 20") and by_task[3].endswith("| not scored |")
    assert tasks.main_table(tmp_path / "fidelity-none.jsonl") == tasks.details(tmp_path / "fidelity-none.jsonl") == []


def numbered(method, task, each, density=1.0, first=0):
    found = ruler_tasks.counted(each, 4)
    return {"bed": "tasks", "method": method, "task": task, "density": density, **found, "first": first, "each": each}


def test_rounds_of_prompts_are_put_together(tmp_path):
    path = tmp_path / "fidelity-gpu.jsonl"
    old = {"bed": "tasks", "method": "dense", "task": "single/4096", "right": 9, "n": 9, "parts": 1.0, "density": 1.0}
    for rows in (
        [old, {**old, "method": "causal"}],
        [numbered("dense", "single/4096", "44"), numbered("hybrid", "single/4096", "4440", 0.2)],
        [numbered("hybrid", "single/4096", "0044", 0.4, first=2), numbered("dense", "single/4096", "42")],
    ):
        raw = tmp_path / "raw.jsonl"
        raw.write_text("".join(json.dumps(each) + "\n" for each in rows))
        results.add([raw], path)
        results.add([raw], path)  # no row twice
    found = paired.joined(results.file_of_bed("tasks", path=path))
    assert found["causal"]["single/4096"] == {**old, "method": "causal"}
    dense, hybrid = found["dense"]["single/4096"], found["hybrid"]["single/4096"]
    # a row that does not tell the prompts apart has given way, the later of two about the same prompts counts
    assert (dense["right"], dense["n"], dense["scores"]) == (1, 2, {0: 1.0, 1: 0.5})
    assert (hybrid["right"], hybrid["n"], hybrid["parts"]) == (4, 6, 4 / 6)
    assert hybrid["scores"] == {0: 1, 1: 1, 2: 0, 3: 0, 4: 1, 5: 1}
    assert hybrid["density"] == pytest.approx((2 * 0.2 + 4 * 0.4) / 6)
    assert paired.joined(tmp_path / "none.jsonl") == {}


def test_differences_go_by_prompt():
    generator = np.random.default_rng(1)
    base = {task: dict(enumerate((generator.random(200) < 0.5).astype(float))) for task in "ab"}
    worse = {task: {at: float(score and at % 20 != 0) for at, score in each.items()} for task, each in base.items()}
    found = paired.difference(worse, base)
    lost = [sum(base[task][at] for at in range(0, 200, 20)) for task in "ab"]
    assert found.mean == pytest.approx(-sum(lost) / 400)
    assert (found.worse, found.better, found.prompts, found.tasks) == (sum(lost), 0, 400, 2)
    # as narrow as prompts that are lost or not allow, not as two independent shares
    error = 1.96 * np.sqrt(sum(lost) / 400 * (1 - sum(lost) / 400) / 400)
    assert found.high - found.low == pytest.approx(2 * error, rel=0.15)
    assert found.low < found.mean < found.high < 0
    # only prompts that both were asked
    assert paired.difference({"a": {0: 1.0, 900: 0.0}}, {"a": {0: 0.5, 901: 1.0}}).prompts == 1
    assert paired.difference({"a": {0: 1.0}}, {"a": {1: 1.0}}) is None
    same = paired.difference(base, base)
    assert (same.mean, same.worse, same.better) == (0, 0, 0)
    assert same.high == -same.low == pytest.approx(3.69 / 400, rel=0.01)


def test_tasks_are_compared_at_equal_density(tmp_path):
    lookups = [f"{task}/4096" for task in tasks.LOOKUPS]
    settings = {
        "dense": ("4" * 40, 1.0),
        "hybrid:gamma=0.9": ("4" * 30 + "0" * 10, 0.2),
        "hybrid:gamma=0.95": ("4" * 40, 0.4),
        "hybrid:gamma=0.95,row_stride=4": ("0" * 40, 0.3),  # another curve's
        "flash_prefill:alpha=0.1": ("4" * 40, 0.3),
        "flash_prefill:alpha=0.05": ("4" * 40, 0.5),
        "xattention:threshold=0.9": ("0" * 40, 0.1),
        "streaming_llm:sink_blocks=1,window_blocks=16": ("0" * 40, 0.2),
    }
    rows = [numbered(method, item, each, density) for method, (each, density) in settings.items() for item in lookups]
    rows += [numbered("dense", "common/4096", "0" * 8)]
    rows += [numbered("moa", item, "4" * 40, 0.3) for item in lookups[: tasks.ENOUGH - 1]]
    rows += [numbered("tri_shape:window_blocks=8", item, "4" * 20 + "0" * 20, 0.3) for item in lookups[: tasks.ENOUGH]]
    rows += [numbered("hybrid_before:gamma=0.9", item, "4" * 40, 0.3) for item in lookups]
    path = tmp_path / "fidelity-gpu.jsonl"
    results.file_of_bed("tasks", path=path).write_text("".join(json.dumps(each) + "\n" for each in rows))
    found = tasks.main_table(path)
    lines = {line.split(" | ")[0]: line for line in found if " | " in line}  # the last table that has it
    against = [line for line in found if line.startswith("| hybrid, gamma 0.9 |")][-1]
    assert (
        against.startswith("| hybrid, gamma 0.9 | -25.0 [-30.") and "at .200; 70 worse, 0 better of 280 in 7 tasks |" in against
    )
    assert lines["| FlashPrefill, alpha 0.1"].startswith("| FlashPrefill, alpha 0.1 | **+12.5 [+10.")
    assert lines["| FlashPrefill, alpha 0.05"] == "| FlashPrefill, alpha 0.05 | +0.0 [-1.3, +1.3] at .500, hybrid at .400 |"
    assert lines["| XAttention, threshold 0.9"] == "| XAttention, threshold 0.9 | fewer blocks, .100 |"
    assert lines["| StreamingLLM, sink blocks 1, window blocks 16"].startswith(
        "| StreamingLLM, sink blocks 1, window blocks 16 | -75.0 ["
    )
    # six lookups of seven are enough to compare, five are not
    assert any(line.startswith("| tri-shape, window blocks 8 |") and "of 240 in 6 tasks" in line for line in found)
    assert lines["| tri-shape, window blocks 8"].startswith("| tri-shape, window blocks 8 | -37.5 [")
    assert not any(line.startswith("| MoA") and line.rstrip("| ").endswith("tasks") for line in found)
    # another rule's rows stand next to hybrid's and are no part of its curve
    assert lines["| hybrid before, gamma 0.9"].endswith("0 worse, 0 better of 280 in 7 tasks |") and tasks.OLDER in found


def test_lengths_beyond_training_are_named():
    assert [tasks.length_name(tokens) for tokens in (65536, 131072)] == ["64k", "128k by YaRN"]


def test_more_blocks_than_hybrid_has_are_not_marked(tmp_path):
    lookups = [f"{task}/4096" for task in tasks.LOOKUPS]
    settings = {"dense": ("4" * 40, 1.0), "hybrid:gamma=0.9": ("0" * 40, 0.2), "flash_prefill:alpha=0.1": ("4" * 40, 0.3)}
    rows = [numbered(method, item, each, density) for method, (each, density) in settings.items() for item in lookups]
    path = tmp_path / "fidelity-gpu.jsonl"
    results.file_of_bed("tasks", path=path).write_text("".join(json.dumps(each) + "\n" for each in rows))
    line = [line for line in tasks.main_table(path) if line.startswith("| FlashPrefill, alpha 0.1 |")][-1]
    assert line == "| FlashPrefill, alpha 0.1 | +100.0 [+100.0, +100.0] at .300, hybrid at .200 |"
