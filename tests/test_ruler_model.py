"""bench/ruler_model: every answer can be found in the tokens, positions and targets agree, training runs."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("tqdm")

from bench.retriever.vocabulary import TOKENS as RETRIEVER_TOKENS
from bench.ruler_model import train
from bench.ruler_model.batches import make_batch
from bench.ruler_model.forward import hidden_states
from bench.ruler_model.lists import list_rows
from bench.ruler_model.prompts import IN_ANY_ORDER, TASKS, make_prompts
from bench.ruler_model.rows import TASKS as TRAINED
from bench.ruler_model.vocabulary import END_OF_VALUES, FIRST_VALUE, TOKENS

TINY = ["--layers", "1", "--batch-tokens", "1024", "--log-every", "1", "--device", "cpu"]


def words(ids):
    return [TOKENS[index] for index in ids.tolist()]


def solve(text, question):
    """The answer to the question, read from the words before it: an ordered list, or a set where any order is right."""
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


def test_one_word_said_twice_counts_once():
    prompts = make_prompts("common", 256, 2)
    assert prompts.parts_right(prompts.answers[:, :1].expand(-1, 4)).tolist() == [1, 1]


def test_facts_need_subject_and_relation():
    text = words(make_prompts("facts", 1024, 1).token_ids[0])
    subject, relation = text[-2:]
    facts = [text[place + 1 : place + 3] for place, word in enumerate(text) if word == "FACT"]
    assert sum(first == subject for first, _ in facts) == 2
    assert sum(second == relation for _, second in facts) >= 2
    assert facts.count([subject, relation]) == 1


@pytest.mark.parametrize(("task", "tokens", "message"), [("multi", 512, "task must be one of"), ("single", 64, "at least 256")])
def test_wrong_prompts_are_refused(task, tokens, message):
    with pytest.raises(ValueError, match=message):
        make_prompts(task, tokens, 1)


@pytest.mark.parametrize(("num_tokens", "count"), [(512, 9), (2048, 9)])
def test_rows_ask_what_stands_before(num_tokens, count):
    rows = make_batch(count * num_tokens, num_tokens, torch.Generator().manual_seed(1), seed=5, list_share=0)[0]
    assert rows.token_ids.shape == (count, num_tokens)
    asked = Counter()
    for row, question in rows.is_answer.any(-1).nonzero().tolist():
        text, positions = words(rows.token_ids[row]), rows.positions[row, question].tolist()
        is_answer, targets = rows.is_answer[row, question].tolist(), rows.targets[row, question]
        task = TRAINED[int(rows.task[row, question])]
        start = positions[0] - {"multi_query": 4}.get(task, 1)
        steps = [step for step in range(4) if is_answer[step]]
        found = solve(text[:start], text[start : positions[steps[0]] + 1])
        said = [text[positions[step] + 1] for step in steps]
        assert len(found) == len(said)
        for step, word in zip(steps, said, strict=True):
            allowed = {TOKENS[index] for index in targets[step].tolist() if index >= 0}
            assert words(targets[step, :1]) == [word]
            assert allowed == (found - set(said[: steps.index(step)]) if isinstance(found, set) else {word})
        assert found == (set(said) if isinstance(found, set) else said)
        asked[task] += 1
    assert set(asked) == set(TRAINED) - {"common", "frequent"}
    assert (rows.is_answer.any(-1) | ~rows.is_first).all()


@pytest.mark.parametrize("num_tokens", [512, 2048])
def test_lists_ask_for_words_that_no_earlier_question_says(num_tokens):
    rows = list_rows(24, num_tokens, torch.Generator().manual_seed(4), seed=9)
    assert rows.token_ids.shape == (24, num_tokens)
    at_the_end = Counter()
    for row in range(24):
        text, written = words(rows.token_ids[row]), set()
        number = 4 if TRAINED[int(rows.task[row, 0])] == "common" else 3
        marker = "COMMON" if number == 4 else "FREQUENT"
        listed, before = [], 0
        for question in range(rows.positions.shape[1]):
            start = int(rows.positions[row, question, 0])
            listed += text[before:start]
            before = start
            if text[start] != marker:
                assert not rows.is_answer[row, question].any()
                continue
            counts = Counter(word for word in listed if word != "<bos>").most_common(number + 1)
            found = {word for word, _ in counts[:number]}
            is_answer, targets = rows.is_answer[row, question].tolist(), rows.targets[row, question]
            if any(is_answer):
                assert counts[number - 1][1] > counts[number][1]
            last = question == rows.positions.shape[1] - 1
            given = max(step for step in range(4) if is_answer[step]) if any(is_answer) else 0
            for step in range(number):
                if is_answer[step]:
                    allowed = {TOKENS[index] for index in targets[step].tolist() if index >= 0}
                    assert allowed == found - set(text[start + 1 : start + 1 + step])
                    assert not allowed & written
            said = text[start + 1 : start + 1 + (number if last else given)]
            written |= set(said)
            before = start + 1 + len(said)
            if last and rows.is_first[row, question]:
                assert is_answer[:number] == [True] * number
                assert marker not in text[:start]
                at_the_end[marker] += 1
    assert set(at_the_end) == {"COMMON", "FREQUENT"}


def test_lists_have_exact_counts():
    prompts = make_prompts("common", 1024, 3)
    for ids, answer in zip(prompts.token_ids, prompts.answers, strict=True):
        counts = Counter(ids[1:-1].tolist())
        often = [counts.pop(word) for word in answer.tolist()]
        assert len(counts) == 64
        assert min(often) >= 97
        assert max(counts.values()) <= 10
    prompts = make_prompts("frequent", 1024, 3)
    for ids, answer in zip(prompts.token_ids, prompts.answers, strict=True):
        counts = Counter(ids[1:-1].tolist()).most_common(4)
        assert [word for word, _ in counts[:3]] == answer.tolist()
        for rank, (_, count) in enumerate(counts, 1):
            assert abs(count - 1024 * 0.6083 / rank**2) <= 3


@pytest.mark.parametrize("num_tokens", [512, 2048, 8192])
@pytest.mark.parametrize("share", [0, 0.5, 0.75])
def test_batches_have_the_same_number_of_tokens(num_tokens, share):
    sizes = set()
    for seed in range(6):
        batch = make_batch(16384, num_tokens, torch.Generator().manual_seed(seed), seed, share)
        sizes.add(sum(rows.token_ids.numel() for rows in batch))
        tokens = [rows.token_ids.shape[1] for rows in batch]
        assert tokens[0] == num_tokens >= max(tokens)
        assert (len(batch) > 1) == (share > 0)
    assert sizes == {16384}


def test_first_questions_are_asked_once():
    rows = make_batch(6 * 1024, 1024, torch.Generator().manual_seed(2), seed=5, list_share=0)[0]
    for row in range(6):
        text = words(rows.token_ids[row])
        at = [positions[0] for positions, first in zip(rows.positions[row].tolist(), rows.is_first[row], strict=True) if first]
        questions = [tuple(text[place - 1 : place + 1]) for place in at if text[place - 1] in ("QUERY", "ALL", "TRACK")]
        assert len(questions) == len(set(questions))


def test_forward_is_that_of_transformers():
    torch.manual_seed(0)
    model = train.start_model(2, None)
    batch = [torch.randint(0, len(TOKENS), shape) for shape in ((2, 40), (1, 16), (3, 64))]
    with torch.no_grad():
        expected = torch.cat([model.model(input_ids=ids).last_hidden_state.flatten(0, 1) for ids in batch])
        torch.testing.assert_close(hidden_states(model, batch, compiled=False), expected, atol=1e-4, rtol=1e-4)


def test_positions_in_training_are_those_of_a_loaded_model(tmp_path):
    trainer = train.TasksTrainer(torch.device("cpu"), 0, 1, None, False, 0.25)
    train.replace_model(trainer.model, tmp_path / "model")
    loaded = train.LlamaForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.bfloat16)
    assert torch.equal(trainer.model.model.rotary_emb.inv_freq, loaded.model.rotary_emb.inv_freq)
    assert trainer.model.lm_head.weight.dtype == torch.bfloat16


def test_start_from_the_retriever_changes_nothing_at_first():
    from bench.ruler_model.evaluate import MODEL

    start = MODEL.parents[1] / "retriever" / "model"
    given = train.LlamaForCausalLM.from_pretrained(start, dtype=torch.float32)
    model = train.start_model(7, start)
    ids = make_prompts("multi_key_8", 256, 2).token_ids
    with torch.no_grad():
        expected = given(input_ids=ids).logits[..., :END_OF_VALUES]
        torch.testing.assert_close(model(input_ids=ids).logits[..., :END_OF_VALUES], expected, atol=1e-3, rtol=1e-3)
    assert sum(part.numel() for part in model.parameters()) * 2 < 16_500_000
    with pytest.raises(ValueError, match="3 layers"):
        train.start_model(3, start)


def test_loss_of_a_sure_and_right_model_is_zero(monkeypatch):
    """Positions, targets and the order of the tokens: hidden states that point at the next token answer everything."""
    trainer = train.TasksTrainer(torch.device("cpu"), 0, 1, None, False, 0.25)
    batch = make_batch(32768, 1024, torch.Generator().manual_seed(3), seed=5)
    assert len(batch) == 3
    width = trainer.model.config.hidden_size
    torch.manual_seed(0)
    weight = torch.nn.functional.normalize(torch.randn(trainer.model.config.vocab_size, width), dim=1)
    trainer.model.lm_head.weight.data = weight
    following = []
    for rows in batch:
        right = rows.token_ids.roll(-1, 1)
        row = torch.arange(len(right))[:, None, None].expand_as(rows.positions)[rows.is_answer]
        right[row, rows.positions[rows.is_answer]] = rows.targets[..., 0][rows.is_answer]
        following.append(right.flatten())
    monkeypatch.setattr(train, "hidden_states", lambda *args: 200 * weight[torch.cat(following)])
    loss, measures = trainer.loss_by_task(batch)
    right, asked, losses, tokens = measures.T
    assert loss < 1e-3
    assert torch.equal(right, asked)
    assert (asked > 0).all()
    assert (losses < 1e-3 * tokens).all()
    same = torch.cat([rows.token_ids.flatten() for rows in batch])
    monkeypatch.setattr(train, "hidden_states", lambda *args: 200 * weight[same])
    assert trainer.loss_by_task(batch)[1][:, 0].sum() == 0


@pytest.mark.parametrize(
    ("spent", "answers", "done"),
    [(0.05, 0.98, True), (0.05, 0.9, False), (0.11, 0.6, True), (0.11, 0.4, False), (0.21, 0.1, True)],
)
def test_stage_ends_when_learned_or_out_of_time(spent, answers, done):
    assert train.stage_is_done(spent, 0.1, answers) == done


def test_training_resumes_from_checkpoint_and_from_weights(tmp_path, monkeypatch):
    monkeypatch.setattr(train, "stage_is_done", lambda *_: True)
    # a clock that moves on by a second whenever it is looked at: a step takes one, and another to see whether to save
    monkeypatch.setattr(train, "time", SimpleNamespace(monotonic=itertools.count().__next__))
    common = ["--out", str(tmp_path / "a"), "--stages", "256:1,512:9", *TINY]

    def log():
        return [json.loads(line) for line in (tmp_path / "a" / "log.jsonl").read_text().splitlines()]

    train.main([*common, "--minutes", str(2 / 60)])
    lines = log()
    assert [(line["seconds"], line["length"]) for line in lines] == [(1, 256), (3, 512)]
    assert all(0 <= share <= 1 for line in lines for share in line["answers"].values())
    train.main([*common, "--minutes", str(5 / 60)])
    more = log()
    assert [(line["step"], line["seconds"], line["length"]) for line in more[2:]] == [(3, 4, 512), (4, 6, 512)]
    masters = torch.load(tmp_path / "a" / "checkpoint.pt", weights_only=True)["masters"]
    for parameter, master in zip(train.start_model(1, tmp_path / "a" / "model").parameters(), masters, strict=True):
        assert torch.equal(parameter, master.bfloat16().float())
