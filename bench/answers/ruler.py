"""RULER's tasks by the generators of lm-evaluation-harness 0.4.13.

Texts of the caller stand for the essays, which the harness would download, and sentences end where ``.``, ``!`` or ``?`` do: its
splitter downloads its model. The harness shuffles needles and coded words by a seed of its own, the same in every prompt.
"""

from __future__ import annotations

import functools
import random
import re
from collections.abc import Iterator
from typing import Any

import numpy as np

from bench.answers.question import Question, listed

_WORDS = {"type_needle_k": "words", "type_needle_v": "numbers"}
NEEDLES: dict[str, tuple[str, dict[str, Any]]] = {
    "niah_single_1": ("repeat", _WORDS),
    "niah_single_2": ("essay", _WORDS),
    "niah_multikey_1": ("essay", {**_WORDS, "num_needle_k": 4}),
    "niah_multikey_2": ("needle", _WORDS),
    "niah_multikey_3": ("needle", {"type_needle_k": "uuids", "type_needle_v": "uuids"}),
    "niah_multivalue": ("essay", {**_WORDS, "num_needle_v": 4}),
    "niah_multiquery": ("essay", {**_WORDS, "num_needle_q": 4}),
}
# with the tokens that the harness lets a model answer
TASKS = {**dict.fromkeys(NEEDLES, 128), "ruler_vt": 30, "ruler_cwe": 120, "ruler_fwe": 50}


def documents(task: str, tokenizer: Any, book: str, length: int, count: int, seed: int) -> list[dict[str, Any]]:
    """The harness's documents of one task, at most `length` tokens each with their answers."""
    from lm_eval.tasks.ruler import cwe_utils, fwe_utils, niah_utils, prepare_niah, vt_utils

    # the harness counts the tokens of a text twice
    tokenizer = functools.lru_cache(2)(tokenizer)
    random.seed(seed)
    np.random.seed(seed)
    cwe_utils.RNG.seed(seed)
    sizes: dict[str, Any] = {"max_seq_length": length, "num_samples": count}
    if task in NEEDLES:
        haystack, options = NEEDLES[task]
        prepare_niah.cached_sent_tokenize = lambda text: re.split(r"(?<=[.!?]) ", text)
        straw = re.sub(r"\s+", " ", book).split(" ") if haystack == "essay" else prepare_niah.get_haystack(type_haystack=haystack)
        shape = {"template": niah_utils.TEMPLATE, "type_haystack": haystack}
        return prepare_niah.generate_samples(straw, TOKENIZER=tokenizer, **sizes, **shape, **options)
    if task == "ruler_vt":
        example = vt_utils.sys_vartrack_w_noise_random(tokenizer=tokenizer, num_samples=1, max_seq_length=500, incremental=5)[0]
        return vt_utils.sys_vartrack_w_noise_random(tokenizer=tokenizer, icl_example=example, **sizes)
    make = cwe_utils.sys_word_pair_random if task == "ruler_cwe" else fwe_utils.sys_kwext
    return make(tokenizer=tokenizer, **sizes)


def questions(task: str, tokenizer: Any, book: str, length: int, count: int, seed: int) -> Iterator[Question]:
    """RULER's questions with whole answers, in the order and the format of `whole_answer`."""
    for document in documents(task, tokenizer, book, length, count, seed):
        text, answers = document["input"], list(document["outputs"])
        if task in NEEDLES:
            if task == "niah_multivalue":
                answers.sort(key=text.index)
            needles = (rf"One of the special magic \w+ for [^:]+ is: {each}\." for each in answers)
            evidence = [next(re.finditer(needle, text))[0] for needle in needles]
        else:
            # the chain's assignments; frequencies have no place
            chain = (rf"VAR {name} = (VAR \w+|\d+)" for name in answers) if task == "ruler_vt" else ()
            evidence = [list(re.finditer(each, text))[-1][0] for each in chain]
        yield Question(text, document["gen_prefix"], whole_answer(task, answers), answers, evidence, TASKS[task])


def whole_answer(task: str, answers: list[str]) -> str:
    """The answer behind RULER's prefix: values in the order of the text or of the question, frequent words by rank."""
    if task == "ruler_vt":
        return " " + " ".join(answers)
    if task == "ruler_cwe":
        return " " + " ".join(f"{number + 1}. {word}" for number, word in enumerate(answers))
    # behind "are" of one key the model goes on with a colon
    return f"{':' if task == 'niah_multivalue' else ''} {listed(answers)}"
