"""Answers of bench/ruler_model: the committed model's, their evaluation, and the bed ``tasks`` of bench/fidelity."""

from __future__ import annotations

import json
import math
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("tqdm")

from transformers import AutoModelForCausalLM, AutoTokenizer

from bench.fidelity.ruler_tasks import FIRST_SEED, Cell, counted, measure_tasks
from bench.ruler_model import evaluate, train
from bench.ruler_model.answers import greedy
from bench.ruler_model.prompts import TASKS, make_prompts
from bench.ruler_model.vocabulary import TOKENS


def test_evaluation_goes_on_where_it_stopped(tmp_path):
    train.save_model(train.start_model(1, None), tmp_path / "model", TOKENS)
    out = tmp_path / "dense.jsonl"
    arguments = ["--model", str(tmp_path / "model"), "--lengths", "256", "--prompts", "2", "--out", str(out), "--device", "cpu"]
    evaluate.main([*arguments, "--tasks", "single,facts"])
    evaluate.main([*arguments, "--tasks", ",".join(TASKS)])
    assert [json.loads(line)["task"] for line in out.read_text().splitlines()][:3] == ["single", "facts", "multi_key_8"]
    assert len(out.read_text().splitlines()) == len(TASKS)


def test_bed_counts_answers_of_every_method(tmp_path):
    from bench.fidelity.run import main as run

    model = train.start_model(1, None)
    train.save_model(model, tmp_path / "model", TOKENS)
    methods, out = tmp_path / "methods.txt", tmp_path / "out.jsonl"
    methods.write_text("streaming_llm:sink_blocks=1,window_blocks=1\nhybrid:gamma=0.9,min_budget=-1\n")
    common = ["tasks", "--methods", str(methods), "--out", str(out), "--ruler-model", str(tmp_path / "model"), "--prompts", "3"]
    common += ["--uncompiled"]
    run([*common, "--lengths", "512", "--tasks", "tracking,common"])
    run([*common, "--lengths", "512", "--tasks", "tracking,common"])
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    rows = [row for row in rows if row["bed"] == "tasks"]
    names = ["dense", "streaming_llm:sink_blocks=1,window_blocks=1"]
    measured = [(row["method"], row["task"]) for row in rows if "error" not in row]
    assert measured == [(name, task) for task in ("tracking/512", "common/512") for name in names]
    assert [row["n"] for row in rows if "error" not in row] == [3] * 4
    assert {row["density"] for row in rows if row["method"] == "dense"} == {1.0}
    assert all(row["density"] < 1 and 0 <= row["parts"] <= 1 for row in rows if row["method"] == names[1])
    assert all(("uncompiled" in row) == (row["method"] == names[1]) for row in rows if "error" not in row)
    # a method that failed is left out at that length, and tried again by the next run
    assert [row["task"] for row in rows if "error" in row] == ["tracking/512"] * 2
    methods.write_text(names[1])
    run([*common, "--lengths", "640", "--tasks", "single", "--without-dense"])
    last = json.loads(out.read_text().splitlines()[-1])
    assert (last["method"], last["task"]) == (names[1], "single/640")
    assert sum("single/640" in line for line in out.read_text().splitlines()) == 1
    # of every prompt the right tokens, which the other figures follow from
    for row in (row for row in rows if "error" not in row):
        assert counted(row["each"], 4).items() <= row.items()
        assert (row["first"], len(row["each"])) == (0, 3)


def test_a_prompt_goes_by_its_number():
    seen = []

    def answer(model, method, token_ids):
        seen.append(token_ids)
        return torch.zeros(len(token_ids), 4, dtype=torch.int64), 1.0

    class Kept:
        def __init__(self):
            self.rows = []

        def has(self, *key):
            return False

        def write(self, **row):
            self.rows.append(row)

    def asked(*cells):
        seen.clear()
        log = Kept()
        measure_tasks(SimpleNamespace(device=torch.device("cpu")), {"dense": None}, cells, answer, log, math.inf)
        assert [(row["first"], row["n"]) for row in log.rows] == [(cell.first, cell.prompts) for cell in cells]
        return torch.cat(seen)

    # 32,768 tokens: four prompts a batch
    whole = asked(Cell("single", 32768, 11))
    assert len({tuple(each[:64].tolist()) for each in whole}) == 11
    parts = asked(Cell("single", 32768, 3), Cell("single", 32768, 6, 3), Cell("single", 32768, 2, 9))
    assert torch.equal(whole, parts)
    assert torch.equal(whole[:4], make_prompts("single", 32768, 4, FIRST_SEED).token_ids)


def test_runs_of_other_prompts_go_on_in_the_same_file(tmp_path):
    from bench.fidelity.run import Log

    log = Log(tmp_path / "out.jsonl")
    log.write(bed="tasks", method="dense", task="single/512", first=0, each="4", n=1)
    log.write(bed="tasks", method="old", task="single/512", n=1)
    log = Log(tmp_path / "out.jsonl")
    assert log.has("dense", "single/512", 0)
    assert not log.has("dense", "single/512", 1)
    assert not log.has("old", "single/512", 0)  # right answers of which prompts is not known


@pytest.mark.parametrize("numbers", [("--prompts", "0"), ("--first", "-1")])
def test_numbers_of_prompts_are_checked(numbers, tmp_path, capsys):
    from bench.fidelity.run import options_of

    methods = tmp_path / "methods.txt"
    methods.write_text("causal\n")
    with pytest.raises(SystemExit):
        options_of(["tasks", "--methods", str(methods), "--out", str(tmp_path / "out"), *numbers])
    assert "--prompts must be at least 1 and --first at least 0" in capsys.readouterr().err


def test_weights_in_the_tree_stay_small():
    files = list((evaluate.MODEL.parents[1]).glob("*/model/*.safetensors"))
    sizes = [file.stat().st_size for file in files]
    assert sizes
    assert max(sizes) <= 14e6
    assert sum(sizes) <= 28e6


def test_table_has_every_task():
    row = {"task": "facts", "tokens": 4096, "right": 96, "prompts": 128, "interval": evaluate.wilson(96, 128), "parts": 0.8125}
    lines = evaluate.table({("facts", 4096): row})
    assert len(lines) == 2 + len(TASKS)
    assert "| facts | 75.0 [67, 82]; 81.2 |" in lines
    assert "| common | - |" in lines


def test_readme_has_the_measured_accuracy():
    found = evaluate.rows_of(evaluate.MODEL.with_name("dense.jsonl"))
    text = evaluate.MODEL.with_name("README.md").read_text(encoding="utf-8")
    assert "\n".join(evaluate.table({cell: row for cell, row in found.items() if cell[1] <= 65536})) in text
    for row in found.values():
        assert row["interval"] == pytest.approx(evaluate.wilson(row["right"], row["prompts"]), abs=1e-4)


@pytest.fixture(scope="module")
def committed():
    return AutoModelForCausalLM.from_pretrained(evaluate.MODEL, dtype=torch.float32).eval()


@pytest.mark.parametrize("task", TASKS)
def test_committed_model_answers(committed, task):
    prompts = make_prompts(task, 512, 3, seed=1)
    answer_tokens = prompts.answers.shape[1]
    right = prompts.parts_right(greedy(committed, prompts.token_ids, answer_tokens)) == answer_tokens
    assert right.sum() >= 2


def test_committed_tokenizer_has_the_vocabulary():
    tokenizer = AutoTokenizer.from_pretrained(evaluate.MODEL)
    assert tokenizer.convert_ids_to_tokens(range(len(TOKENS))) == list(TOKENS)
