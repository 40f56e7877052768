"""bench/ruler_model: prompts hold their answers; the committed model answers."""

import pytest
import torch

pytest.importorskip("transformers")

from transformers import AutoModelForCausalLM, AutoTokenizer

from bench.ruler_model.answers import MODEL, greedy
from bench.ruler_model.prompts import TASKS, make_prompts
from bench.ruler_model.vocabulary import TOKENS


def test_weights_in_the_tree_stay_small():
    files = list((MODEL.parents[1]).glob("*/model/*.safetensors"))
    sizes = [file.stat().st_size for file in files]
    assert sizes and max(sizes) <= 14e6
    assert sum(sizes) <= 28e6


@pytest.fixture(scope="module")
def committed():
    return AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()


@pytest.mark.parametrize("task", TASKS)
def test_committed_model_answers(committed, task):
    prompts = make_prompts(task, 512, 3, seed=1)
    answer_tokens = prompts.answers.shape[1]
    right = prompts.parts_right(greedy(committed, prompts.token_ids, answer_tokens)) == answer_tokens
    assert right.sum() >= 2


def test_committed_tokenizer_has_the_vocabulary():
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    assert tokenizer.convert_ids_to_tokens(range(len(TOKENS))) == list(TOKENS)
