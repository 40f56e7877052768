"""bench.answers: questions and their answers, prompts, what is read behind a prefill, tables."""

import argparse
import json
import random
import string
from collections import Counter
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("transformers")

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch.nn.attention.flex_attention import BlockMask
from transformers import PreTrainedTokenizerFast

from bench.answers import evaluate, prompts, ruler, tasks
from bench.answers.evidence import Kept, token_spans
from bench.answers.words import CLASSES
from bench.rows import read_rows
from flexmask.method import METHODS
from tests.integrations.common import make_model

SIZES = {"code": 30, "json": 30}


def byte_tokenizer():
    """A token for each byte."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


BYTES = byte_tokenizer()


def asked(task, seed=0):
    return tasks.TASKS[task](random.Random(seed), SIZES.get(task, 400))


@pytest.mark.parametrize("task", tasks.TASKS)
def test_a_question_holds_its_answer_and_each_piece_of_evidence_once(task):
    question = asked(task)
    assert question == asked(task) != asked(task, seed=1)
    assert all(part in question.text and part in question.answer for part in question.answers)
    assert [question.text.count(piece) for piece in question.evidence] == [1] * len(question.evidence)
    assert bool(question.evidence) == (task not in ("frequent", "many_shot"))


def test_answers_follow_from_the_texts():
    words = Counter(asked("frequent").text.split("\n\n")[1].split()).most_common(4)
    assert [word for word, _ in words[:3]] == asked("frequent").answers and words[2][1] > 2 * words[3][1]
    track = asked("track")
    value = track.prefix.split()[-2]
    for line in track.text.splitlines():
        if line.startswith("VAR ") and line.split(" = ")[1] in (value, f"VAR {value}"):
            assert line.split()[1] == track.answers[0]
    assert [line.split()[1] for line in track.evidence] == track.answers and track.evidence[0].endswith(f"= {value}")
    assert all(line.endswith(f"= VAR {before}") for line, before in zip(track.evidence[1:], track.answers, strict=False))
    entries = json.loads(asked("json").text.rpartition("\n\n")[0])
    assert [str(each["serial"]) for each in entries if each["name"] in asked("json").prefix] == asked("json").answers
    compile(asked("code").text.split("```")[1].removeprefix("python\n"), "code", "exec")
    shots = asked("many_shot")
    *examples, question = [line for line in shots.text.splitlines() if " spoke of " in line]
    word = question.split(" spoke of ")[1].split(".")[0]
    (kind,) = [words for words in CLASSES.values() if word in words]
    labels = {line.split("Class: ")[1] for line in examples if line.split(" spoke of ")[1].split(".")[0] in kind}
    assert labels == set(shots.answers) and not any(f" spoke of {word}." in line for line in examples)


def test_prompts_are_as_long_as_asked_and_know_where_their_evidence_stands(tmp_path):
    made = {task: list(prompts.prompts(task, BYTES, "", 12000, 2, seed=3)) for task in tasks.TASKS}
    for task, rows in made.items():
        assert rows == list(prompts.prompts(task, BYTES, "", 12000, 2, seed=3))
        assert rows[0]["prompt"] != rows[1]["prompt"] and [row["index"] for row in rows] == [0, 1]
        for row in rows:
            whole = len(row["prompt"] + row["answer"])
            assert 11000 < whole <= 12000 and row["tokens"] == whole - len(row["answer"])
            found = [row["prompt"][start:end] for start, end in row["evidence"]]
            assert all(found) and (task in ("frequent", "many_shot", "track") or row["answers"][0] in found[-1])
    path = tmp_path / "prompts.jsonl.xz"
    with prompts.opened(path, "wt") as file:
        file.write(json.dumps(made["code"][0]) + "\n")
    assert prompts.read_prompts(path) == json.loads(json.dumps(made["code"][:1]))


def test_prompts_end_where_the_answer_begins_in_a_chat_template():
    chatty = byte_tokenizer()
    chatty.chat_template = "{% for each in messages %}<{{ each.content }}>{% endfor %}{% if add_generation_prompt %}!{% endif %}"
    assert prompts.in_template(chatty, "What?", "It is") == "<What?>!It is"
    assert prompts.in_template(BYTES, "What?", "It is") == "What?\nIt is"


LETTERS = string.ascii_letters + string.digits + " ."


def letter_tokenizer():
    """A token for each of 64 letters, so that whatever a model answers is a text."""
    tokenizer = Tokenizer(models.WordLevel({letter: i for i, letter in enumerate(LETTERS)}, unk_token="."))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Split(Regex("."), "isolated"), decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


TOKENIZER, MODEL = letter_tokenizer(), make_model(vocab_size=64, initializer_range=0.3)
TEXT = "".join(random.Random(0).choices(LETTERS, k=515))
ALL = {"name": "all", "gamma": 1.0, "block_size": 32, "dense_below": 0}
FEW = {"name": "few", "method": "streaming_llm", "sink_blocks": 1, "window_blocks": 1, "block_size": 32, "dense_below": 0}


def a_row(answer, answers, index=0):
    same = {"task": "records", "length": 512, "seed": 0, "tokens": 515, "prompt": TEXT, "evidence": [(64, 80)]}
    return {**same, "index": index, "answer": answer, "answers": answers, "new_tokens": len(answer)}


def dense_log_probs(answer):
    ids = TOKENIZER(TEXT + answer, return_tensors="pt").input_ids
    with torch.no_grad():
        logits = MODEL(input_ids=ids).logits[0, len(TEXT) - 1 : -1]
    return logits.log_softmax(-1).gather(1, ids[0, len(TEXT) :, None])[:, 0]


def measured(tmp_path, rows, settings, **options):
    (tmp_path / "settings.json").write_text(json.dumps(settings), encoding="utf-8")
    given = {"settings": tmp_path / "settings.json", "out": tmp_path / "rows.jsonl", "chunk": None, "kept": True, "greedy": True}
    evaluate.measure(MODEL, TOKENIZER, rows, argparse.Namespace(**{**given, "name": "tiny", **options}))
    return read_rows(tmp_path / "rows.jsonl")


def test_the_answer_is_read_as_a_dense_forward_reads_it_when_all_is_kept(tmp_path):
    rows = measured(tmp_path, [a_row(" abc. de", ["abc", "de"])], ["dense", ALL, FEW])
    rows = measured(tmp_path, [a_row(" abc. de", ["abc", "de"])], ["dense", ALL], chunk=256)
    expected = float(dense_log_probs(" abc. de").sum())
    found = {(row["setting"], row["chunk"]): row for row in rows}
    assert len(rows) == len(found) == 5
    for place in (("dense", None), ("all", None), ("dense", 256), ("all", 256)):
        assert found[place]["logp"] == pytest.approx(expected, abs=1e-3) and found[place]["density"] == 1
    few = found["few", None]
    assert abs(few["logp"] - expected) > 1e-3 and few["density"] < 0.3
    # block 2 of 17: seen by 15 rows of blocks, kept by its own
    assert few["kept_last"] == 0 and few["kept_rows"] == pytest.approx(1 / 15)
    assert found["all", 256]["kept_last"] == found["all", 256]["kept_rows"] == 1 and "kept_last" not in found["dense", None]
    # the same command adds nothing, another setting of the name is refused
    assert measured(tmp_path, [a_row(" abc. de", ["abc", "de"])], ["dense", ALL, FEW]) == rows
    with pytest.raises(ValueError, match="has other options of few"):
        measured(tmp_path, [a_row(" abc. de", ["abc", "de"])], [{**FEW, "window_blocks": 2}])


def test_an_answer_is_exact_if_greedy_decoding_gives_it(tmp_path):
    ids = TOKENIZER(TEXT, return_tensors="pt").input_ids
    with torch.no_grad():
        for _ in range(6):
            ids = torch.cat([ids, MODEL(input_ids=ids).logits[:, -1:].argmax(-1)], 1)
    greedy = TOKENIZER.decode(ids[0, -6:])
    assert len(set(greedy)) > 1
    wrong = greedy[:-1] + ("x" if greedy[-1] != "x" else "y")
    for index, (answer, exact, share) in enumerate([(greedy, True, 1.0), (wrong, False, 0.5)]):
        row = measured(tmp_path, [a_row(answer, [answer[:3], answer[3:]], index)], [])[-1]
        assert (row["exact"], row["parts"]) == (exact, share) and row["score"] == share


# as a class, which looks its module up
OWN_METHOD = """from __future__ import annotations
from dataclasses import KW_ONLY, dataclass
from flexmask.mask_function import Method, mask_function

@dataclass(frozen=True, eq=False)
class SinksOfFile(Method):
    "The first blocks."
    _: KW_ONLY
    number: int = 1
    def select(self, problem):
        return problem.first_blocks(self.number)

sinks_of_file = mask_function("sinks_of_file", SinksOfFile)
"""


def test_a_method_of_a_file_is_a_setting(tmp_path):
    (tmp_path / "own.py").write_text(OWN_METHOD, encoding="utf-8")
    own = {"name": "own", "method_file": f"{tmp_path}/own.py:sinks_of_file", "number": 2, "block_size": 64}
    made = evaluate.prefill_settings(own)
    assert (made.options, made.block_size, made.layer_method().name) == ({"number": 2}, 64, "sinks_of_file")
    del METHODS["sinks_of_file"]
    with pytest.raises(ValueError, match=r"must be FILE\.py:function; got own\.py"):
        evaluate.prefill_settings({**own, "method_file": "own.py"})
    (tmp_path / "twice.json").write_text('[{"name": "a"}, {"name": "a"}]', encoding="utf-8")
    with pytest.raises(ValueError, match="must have different names; got a, a"):
        evaluate.read_settings(tmp_path / "twice.json")


def test_prompts_are_shared_out_by_shards(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"task": task, "index": i}) + "\n" for task in "ab" for i in range(3)), encoding="utf-8")
    given = {"prompts": path, "tasks": None, "limit": 2}
    parts = [evaluate.chosen(argparse.Namespace(**given, shard=f"{each}/3")) for each in range(3)]
    assert sorted((row["task"], row["index"]) for part in parts for row in part) == [("a", 0), ("a", 1), ("b", 0), ("b", 1)]
    assert [row["task"] for row in evaluate.chosen(argparse.Namespace(**{**given, "tasks": "b"}, shard="0/1"))] == ["b", "b"]


def test_the_kept_share_counts_full_and_partial_blocks():
    # four query blocks of one head; the last keeps blocks 0, 1 and 3
    counts, full_counts = torch.tensor([[[1, 1, 1, 1]]]), torch.tensor([[[0, 0, 1, 2]]])
    indices = torch.tensor([[[[0, 9, 9, 9], [1, 9, 9, 9], [2, 9, 9, 9], [3, 9, 9, 9]]]])
    full = torch.tensor([[[[9, 9, 9, 9], [9, 9, 9, 9], [1, 9, 9, 9], [0, 1, 9, 9]]]])
    whole = [tensor.int() for tensor in (counts, indices, full_counts, full)]
    # indices past the counts are not read
    for tensor in whole[1::2]:
        tensor[tensor == 9] = 0
    mask = BlockMask.from_kv_blocks(*whole, BLOCK_SIZE=16)
    kept = Kept([(20, 30), (40, 41)], 16)
    assert kept.columns == [1, 2]
    # block 1 is seen by rows 1 to 3 and kept by all of them, block 2 by rows 2 and 3 and kept by row 2
    shares = kept.shares({0: [mask], 1: [None]}, 64, 64)
    assert shares == {"kept_last": pytest.approx((0.5 + 1) / 2), "kept_rows": pytest.approx((4 / 5 + 1) / 2)}
    assert Kept([(31, 33)], 16).columns == [1, 2] and token_spans(BYTES, "abcdef", [(2, 4)]) == [(2, 4)]


@pytest.mark.parametrize("task", ruler.TASKS)
def test_rulers_questions_hold_their_answers(task):
    pytest.importorskip("lm_eval")
    pytest.importorskip("wonderwords")
    book = " ".join(f"Sentence number {each} of a book stands here." for each in range(3000))

    def tokenizer(text):
        return SimpleNamespace(input_ids=range(len(text) // 4))

    made = [list(ruler.questions(task, tokenizer, book, 8000, 2, seed)) for seed in (0, 0, 1)]
    assert made[0] == made[1] != made[2] and len(made[0]) == 2
    for question in made[0]:
        assert all(part in question.text and part in question.answer for part in question.answers)
        assert all(piece in question.text for piece in question.evidence)
        assert len(question.evidence) == (0 if task in ("ruler_cwe", "ruler_fwe") else len(question.answers))
