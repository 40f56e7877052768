"""bench.answers and bench.report: tables of answers by setting.

What decides something in the committed rows is tested on the pages (tests/test_documents.py).
"""

import json

import pytest

pytest.importorskip("transformers")

from bench.answers import ruler, table
from bench.answers.__main__ import main


def result(task, index, setting, logp, exact, **more):
    same = {"length": 1, "seed": 0, "chunk": None, "model": "m", "density": 0.25}
    return {"task": task, "index": index, "setting": setting, "logp": logp, "exact": exact, **same, **more}


def test_tables_pair_settings_with_dense_by_prompt(tmp_path, capsys):
    rows = [
        *(result("ruler_vt", i, "dense", -1.0, True) for i in range(4)),
        *(result("ruler_vt", i, "h", -1.0 + change, i > 0) for i, change in enumerate((0.5, 0.5, -0.5, -1.5))),
        *(result("niah_single_1", i, "dense", -2.0, i == 0) for i in range(2)),
        *(result("niah_single_1", i, "h", -1.0, True, kept_last=0.5) for i in range(2)),
        *(result("niah_single_1", i, "g", -1.5, True) for i in range(2)),
        result("ruler_vt", 9, "h", -9.0, False),  # without a partner
    ]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    main(["table", str(path)])
    written = capsys.readouterr().out.splitlines()
    # standard deviation of 0.5, 0.5, -0.5, -1.5: sqrt(11 / 12)
    start = "| `ruler_vt` | h | 4 | 100.0 | 75.0 | -25.0 [-75.0, +0.0] | -0.25 ± 0.48 | 25.0% |"
    assert any(line.startswith(start) for line in written)
    (single,) = [line for line in written if line.startswith("| `niah_single_1` | h |")]
    assert single.startswith("| `niah_single_1` | h | 2 | 50.0 | 100.0 | +50.0 ") and single.endswith("| 25.0% | 50.0% |  |")
    (mean,) = [line for line in written if line.startswith("| RULER")]
    assert mean.startswith("| RULER, 2 tasks | h | 6 | 75.0 | 87.5 | +12.5 [")
    main(["table", str(path), "--against", "g"])
    assert "| `niah_single_1` | h | 2 | 100.0 | 100.0 | +0.0 [+0.0, +0.0] | +0.50 ± 0.00 |" in capsys.readouterr().out


def test_the_interval_of_rulers_mean_draws_prompts_within_tasks():
    # one task never changes, so the mean changes by half of the other's
    low, high = table.of_task_means([[0.0] * 50, [-1.0] * 25 + [0.0] * 25])
    assert low == pytest.approx(-0.32, abs=0.03) and high == pytest.approx(-0.18, abs=0.03)


@pytest.fixture
def report(tmp_path):
    pytest.importorskip("pandas")
    from bench.report import answers

    def write(rows):
        lines = (json.dumps({**row, "length": 32768, "parts": float(row["exact"])}) + "\n" for row in rows)
        (tmp_path / answers.FILE).write_text("".join(lines), encoding="utf-8")
        return lambda **options: [[*map(str.strip, line.split("|")[1:-1])] for line in answers.by_task(tmp_path, **options)[3:-1]]

    return write


def test_the_report_compares_each_setting_on_its_own_prompts_and_says_how_many(report):
    read = report([
        *(result("json", i, "dense", -2.0, i != 1) for i in range(4)),
        *(result("json", i, "hybrid 0.9", -2.5, i == 0) for i in range(4)),
        *(result("json", i, "xattention 0.8", -4.0, False) for i in range(2)),
        *(result("json", i, "earlier rule 0.9", -9.0, False) for i in range(4)),
        *(result("records", i, "dense", -1.0, True) for i in range(2)),
        *(result("records", i, "hybrid 0.9", -1.0, True) for i in range(2)),
    ])  # fmt: skip
    # in the order of the tasks; dense answers three of json's four prompts, one of the two that xattention has
    hybrid, other = ["-50.0 [-100.0, +0.0]", "-0.50 ± 0.00", "25.0%", "4"], ["-50.0 [-100.0, +0.0]", "-2.00 ± 0.00", "25.0%", "2"]
    # a setting alone has a column for each figure
    assert read() == [["`records`", "100.0", "+0.0 [+0.0, +0.0]", "+0.00 ± 0.00", "25.0%", "2"], ["`json`", "75.0", *hybrid]]
    # of several a column each, in the order asked for
    both = ("xattention 0.8", "hybrid 0.9")
    assert read(chosen=both)[1:] == [["`json`", "75.0", "; ".join(other), "; ".join(hybrid)]]
    assert read(chosen=both, figures=("points",))[1:] == [["`json`", "75.0", other[0], hybrid[0]]]
    one = ["`json`", "50.0", "-50.0 [-100.0, +0.0]", "-1.50 ± 0.00", "25.0%", "2"]
    assert read(against="hybrid 0.9", chosen=("xattention 0.8",)) == [one]


def test_the_report_means_all_tasks_of_ruler_with_the_same_weight(report):
    counts = {**dict.fromkeys(ruler.TASKS, 2), "ruler_fwe": 20}
    rows = [
        *(result(task, i, "dense", -1.0, True) for task in counts for i in range(counts[task])),
        *(result(task, i, "hybrid 0.9", -1.0, task != "ruler_fwe") for task in counts for i in range(counts[task])),
        *(result("ruler_vt", i, "hybrid 0.95", -1.0, True) for i in range(2)),
    ]
    *_, mean = report(rows)()
    # one task of ten is lost whole
    assert mean == ["RULER, 10 tasks", "100.0", "-10.0 [-10.0, -10.0]; 25.0%; 38", "-"]
    # dense is that of the setting with the most prompts
    fewer = [result(task, 30, setting, -1.0, False) for task in counts for setting in ("dense", "hybrid 0.8")]
    *_, mean = report([*fewer, *rows])()
    assert mean == ["RULER, 10 tasks", "100.0", "+0.0 [+0.0, +0.0]; 25.0%; 10", "-10.0 [-10.0, -10.0]; 25.0%; 38", "-"]
    assert all("RULER" not in line[0] for line in report([row for row in rows if row["task"] != "ruler_cwe"])())
