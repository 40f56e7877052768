"""Answers of bench/ruler_model: the committed model's, and their evaluation."""

from __future__ import annotations

import json

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("tqdm")

from transformers import AutoModelForCausalLM, AutoTokenizer

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
