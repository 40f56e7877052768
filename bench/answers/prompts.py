"""Prompts of a length with exact answers, as lines of JSON: ``python -m bench.answers prompts``."""

from __future__ import annotations

import argparse
import gzip
import json
import lzma
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench.answers import ruler, tasks
from bench.answers.question import Question

TASKS = (*ruler.TASKS, *tasks.TASKS)
_OPEN: dict[str, Any] = {".gz": gzip.open, ".xz": lzma.open}


def opened(path: Path, mode: str = "rt") -> Any:
    """A text file, compressed by its ending."""
    return _OPEN.get(path.suffix, open)(path, mode, encoding="utf-8")


def read_prompts(path: Path) -> list[dict[str, Any]]:
    with opened(path) as file:
        return [json.loads(line) for line in file]


def in_template(tokenizer: Any, text: str, prefix: str) -> str:
    """The prompt up to the answer: in the model's chat template where it has one, else with its first token if it adds one."""
    if tokenizer.chat_template:
        asked = [{"role": "user", "content": text}]
        return str(tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=True)) + prefix
    first = tokenizer.bos_token if tokenizer("a").input_ids[0] == tokenizer.bos_token_id else ""
    return f"{first}{text}\n{prefix}"


def count(tokenizer: Any, prompt: str) -> int:
    return len(tokenizer(prompt, add_special_tokens=False).input_ids)


def spans(prompt: str, evidence: tuple[str, ...] | list[str]) -> list[tuple[int, int]]:
    """The characters [first, end) of each piece of evidence, by its last place; raises ValueError where there is none."""
    return [(start := prompt.rindex(piece), start + len(piece)) for piece in evidence]


def own_questions(task: str, tokenizer: Any, length: int, number: int, seed: int) -> Iterator[Question]:
    """Questions of one of our tasks, the largest that stay within `length` tokens with the template and the answer."""
    make = tasks.TASKS[task]

    def tokens(question: Question) -> int:
        return count(tokenizer, in_template(tokenizer, question.text, question.prefix) + question.answer)

    def drawn(index: int, size: int) -> Question:
        return make(random.Random(f"{task} {seed} {index}"), size)

    low, high = tokens(drawn(0, 64)), tokens(drawn(0, 192))
    size = 64 + int((length - low) * 128 / (high - low))
    for index in range(number):
        question = drawn(index, size)
        while (most := tokens(question)) > length:
            # a draw is within a few percent of another of its size
            size -= max(1, int(size * 1.02 * (most - length) / length))
            question = drawn(index, size)
        yield question


def prompts(task: str, tokenizer: Any, book: str, length: int, number: int, seed: int) -> Iterator[dict[str, Any]]:
    """Prompts of a task as rows: its place, the prompt up to the answer, the answer, and where its evidence stands."""
    made = (
        ruler.questions(task, tokenizer, book, length, number, seed)
        if task in ruler.TASKS
        else own_questions(task, tokenizer, length, number, seed)
    )
    for index, question in enumerate(made):
        prompt = in_template(tokenizer, question.text, question.prefix)
        yield {
            "task": task,
            "length": length,
            "seed": seed,
            "index": index,
            "tokens": count(tokenizer, prompt),
            "answer": question.answer,
            "answers": question.answers,
            "new_tokens": question.new_tokens,
            "evidence": spans(prompt, list(question.evidence)),
            "prompt": prompt,
        }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", type=Path, required=True, help="folder with the tokenizer")
    parser.add_argument("--out", type=Path, required=True, help="file of lines of JSON, .gz and .xz compressed")
    parser.add_argument("--length", type=int, default=32768, help="tokens of a prompt at most (32768)")
    parser.add_argument("--count", type=int, default=200, help="prompts of a task (200)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tasks", default="all", help=f"all, ruler, own, or some of {','.join(TASKS)}")
    parser.add_argument("--books", type=Path, nargs="+", default=[], help="texts that stand for RULER's essays")


def main(options: argparse.Namespace) -> None:
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(options.model)
    sets = {"all": TASKS, "ruler": tuple(ruler.TASKS), "own": tuple(tasks.TASKS)}
    chosen = sets.get(options.tasks) or options.tasks.split(",")
    book = "\n".join(path.read_text(encoding="latin-1") for path in options.books)
    with opened(options.out, "wt") as file:
        for task in chosen:
            for row in prompts(task, tokenizer, book, options.length, options.count, options.seed):
                file.write(json.dumps(row) + "\n")
            print(f"{task}: {options.count} prompts", flush=True)
