"""bench/ruler_model: prompts hold their answers; the committed model answers; evaluation resumes."""

import json

import pytest
import torch

pytest.importorskip("transformers")

from transformers import AutoModelForCausalLM, AutoTokenizer

from bench.ruler_model import evaluate
from bench.ruler_model.evaluate import greedy
from bench.ruler_model.prompts import TASKS, make_prompts
from bench.ruler_model.vocabulary import TOKENS


def test_evaluation_goes_on_where_it_stopped(tmp_path):
    out = tmp_path / "dense.jsonl"
    arguments = ["--lengths", "256", "--prompts", "2", "--out", str(out), "--device", "cpu"]
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
