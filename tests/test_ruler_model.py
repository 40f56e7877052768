"""bench/ruler_model: prompts hold their answers; the committed model answers; evaluation resumes."""

import json
from collections import Counter

import pytest
import torch

pytest.importorskip("transformers")

from transformers import AutoModelForCausalLM, AutoTokenizer

from bench.retriever.vocabulary import TOKENS as RETRIEVER_TOKENS
from bench.ruler_model import evaluate
from bench.ruler_model.evaluate import greedy
from bench.ruler_model.prompts import IN_ANY_ORDER, TASKS, make_prompts
from bench.ruler_model.vocabulary import END_OF_VALUES, FIRST_VALUE, TOKENS


def words(ids):
    return [TOKENS[index] for index in ids.tolist()]


def solve(text, question):
    """The answer, read from the words before the question; a set where any order is right."""
    marker, *asked = question

    def records(name, fields):
        at = (place for place, word in enumerate(text) if word == name)
        return [text[place + 1 : place + 1 + fields] for place in at]

    if marker == "QUERY":
        (found,) = [values for key, *values in records("KEY", 5) if key == asked[0]]
        return found
    if marker == "ASK":
        first = {key: value for key, value, *_ in records("KEY", 5)}
        return [first[key] for key in asked]
    if marker == "ALL":
        return {value for key, value in records("MANY", 2) if key == asked[0]}
    if marker == "TRACK":
        step = dict(records("SET", 2))
        chain = [asked[0]]
        while chain[-1] in step:
            chain.append(step[chain[-1]])
        return chain[1:]
    if marker == "WHO":
        (found,) = [values for subject, relation, *values in records("FACT", 4) if [subject, relation] == asked]
        return found
    assert marker in ("COMMON", "FREQUENT")
    counts = Counter(word for word in text if word in RETRIEVER_TOKENS[FIRST_VALUE:END_OF_VALUES])
    top = counts.most_common(5)
    number = 4 if marker == "COMMON" else 3
    assert top[number - 1][1] > top[number][1]
    return {word for word, _ in top[:number]}


@pytest.mark.parametrize("task", TASKS)
def test_prompt_holds_its_answer(task):
    prompts = make_prompts(task, 1024, 4, seed=7)
    assert prompts.token_ids.shape == (4, 1024)
    question = {"multi_query": 5, "facts": 3, "common": 1, "frequent": 1}.get(task, 2)
    for ids, answer in zip(prompts.token_ids, prompts.answers, strict=True):
        text = words(ids)
        found = solve(text[:-question], text[-question:])
        assert (found == set(words(answer))) if task in IN_ANY_ORDER else (found == words(answer))
    assert torch.equal(prompts.parts_right(prompts.answers), torch.full((4,), prompts.answers.shape[1]))
    turned = prompts.parts_right(prompts.answers.flip(1))
    assert (turned == prompts.answers.shape[1]).all() if task in IN_ANY_ORDER else (turned < prompts.answers.shape[1]).all()
    assert torch.equal(prompts.token_ids, make_prompts(task, 1024, 4, seed=7).token_ids)
    assert not torch.equal(prompts.token_ids, make_prompts(task, 1024, 4, seed=8).token_ids)


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
