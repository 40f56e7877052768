"""Run RULER tasks by lm-evaluation-harness, dense and sparse: ``python -m bench.ruler.run --model FOLDER --out FILE.jsonl``.

Writes a line per prompt. The same command resumes. Rounds over tasks and methods keep all methods on the same prompts.
``--against hf`` compares the harness's ``hf`` model with everything kept.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from lm_eval.evaluator import evaluate
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from transformers import AutoModelForCausalLM, AutoTokenizer

from bench.rows import append_row, read_rows
from bench.ruler.table import DENSE, PASSES
from flexmask.integrations.huggingface import sparse_prefill

# the others download essays, SQuAD or HotpotQA
OFFLINE = ("niah_single_1", "niah_multikey_2", "niah_multikey_3", "ruler_vt", "ruler_cwe", "ruler_fwe")
TASKS = Path(__file__).parents[1] / "tasks"
METHODS: dict[str, dict[str, Any]] = {
    "hybrid 0.95": {"method": "hybrid", "gamma": 0.95},
    "hybrid 0.9": {"method": "hybrid", "gamma": 0.9},
    "flexprefill 0.95": {"method": "flexprefill", "gamma": 0.95},
    "xattention 0.9": {"method": "xattention", "threshold": 0.9},
}
KEEP_ALL = {"everything kept": {"method": "hybrid", "gamma": 1.0}}


class Log:
    """Lines of JSON, written at once."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._scores = {self._key(row): row["score"] for row in read_rows(path) if "task" in row}

    @staticmethod
    def _key(row: dict[str, Any]) -> tuple[Any, ...]:
        return tuple(row[name] for name in ("model", "task", "length", "method", "prompt"))

    def has(self, **row: Any) -> bool:
        """True if there is a line for this prompt."""
        return self._key(row) in self._scores

    def mean(self, **cell: Any) -> float | None:
        """Mean score over the prompts of a cell; None without prompts."""
        found = [score for key, score in self._scores.items() if key[:-1] == self._key({**cell, "prompt": 0})[:-1]]
        return sum(found) / len(found) if found else None

    def write(self, **row: Any) -> None:
        if "task" in row:
            self._scores[self._key(row)] = row["score"]
        append_row(self._path, row)


class Prompts:
    """The harness's tasks by task and length, loaded once."""

    def __init__(self, metadata: dict[str, Any]) -> None:
        self._metadata = metadata
        self._loaded: dict[tuple[str, int], Any] = {}

    def load(self, task: str, length: int) -> Any:
        if (task, length) not in self._loaded:
            # RULER draws its prompts from these, which the harness's command sets to 0 and 1234
            random.seed(0)
            np.random.seed(1234)
            manager = TaskManager(include_path=str(TASKS), metadata={**self._metadata, "max_seq_lengths": [length]})
            self._loaded[task, length] = manager.load([task])
        return self._loaded[task, length]


def judge(
    lm: Any, loaded: Any, task: str, length: int, prompts: Sequence[int], options: dict[str, Any] | None, chat: bool = False
) -> list[dict[str, Any]]:
    """Score, answer, density and seconds of each prompt; density and seconds are means. Without options attention is dense."""
    start = time.monotonic()
    with nullcontext() if options is None else sparse_prefill(lm.model, **options) as run:
        results: Any = evaluate(
            lm=lm, task_dict=loaded, samples={task: list(prompts)}, log_samples=True, bootstrap_iters=0, apply_chat_template=chat
        )
    seconds = round((time.monotonic() - start) / len(prompts), 3)
    samples = results["samples"][task]
    density = 1.0 if run is None else run.summary().density
    found = {}
    for sample in samples:
        score = sample[str(length)] if str(length) in sample else sample["exact_match"]
        answer = sample["filtered_resps"][0]
        found[sample["doc_id"]] = {"score": score, "density": density, "answer": answer, "seconds": seconds}
    assert sorted(found) == sorted(prompts)
    return [found[prompt] for prompt in prompts]


def cells(options: argparse.Namespace, methods: Sequence[str]) -> Iterator[tuple[int, str, list[int], str]]:
    """Length, task, prompts and method, in rounds."""
    for first in range(options.first, options.prompts, options.round):
        prompts = list(range(first, min(first + options.round, options.prompts)))
        for length in options.lengths:
            for task in options.tasks:
                yield from ((length, task, prompts, method) for method in methods)


def options_of(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder or name")
    parser.add_argument("--out", type=Path, required=True, help="JSON lines are added to it")
    parser.add_argument("--name", help="the model's in the table; none: that of the folder")
    parser.add_argument("--tasks", type=lambda text: text.split(","), default=OFFLINE, help="RULER's six without download")
    parser.add_argument("--lengths", type=lambda text: [int(part) for part in text.split(",")], default=[4096], help="4096")
    parser.add_argument("--methods", help=f"some of {DENSE},{','.join(METHODS)}; all")
    parser.add_argument("--against", choices=["hf"], help="compare dense with everything kept instead")
    parser.add_argument("--prompts", type=int, default=500, help="of each task and length (500, as RULER has)")
    parser.add_argument("--first", type=int, default=0, help="the prompt to begin with, where several processes share a task (0)")
    parser.add_argument("--round", type=int, default=1, help="prompts of a task before the next task (1)")
    parser.add_argument("--chat", action="store_true", help="with the chat template")
    parser.add_argument("--skip-failing", action="store_true", help="leave out tasks that the dense model fails (under 80%%)")
    parser.add_argument("--minutes", type=float, default=600.0, help="no new round after that (600)")
    parser.add_argument("--dtype", default="auto", help="of the weights (auto)")
    return parser.parse_args(arguments)


def methods_of(options: argparse.Namespace) -> dict[str, dict[str, Any] | None]:
    """The options of each method, dense first, which has None."""
    known = {DENSE: None, **{name: {**own, "dense_below": 0} for name, own in (KEEP_ALL if options.against else METHODS).items()}}
    return {name: known[name] for name in (known if options.methods is None else options.methods.split(","))}


def main(arguments: Sequence[str] | None = None) -> None:
    options = options_of(arguments)
    stop = time.monotonic() + 60 * options.minutes
    log, name = Log(options.out), options.name or Path(options.model).name
    device = "cuda" if torch.cuda.is_available() else "cpu"
    loaded: Any = AutoModelForCausalLM.from_pretrained(options.model, dtype=options.dtype)
    model = loaded.to(device).eval()
    # room for a chat template, and for tasks whose prompts fill the length
    room = max(options.lengths) + 512
    lm = HFLM(pretrained=model, tokenizer=AutoTokenizer.from_pretrained(options.model), batch_size=1, max_length=room)
    methods = methods_of(options)
    prompts = Prompts({"pretrained": options.model, "num_samples": options.prompts})
    where = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    log.write(device=where, torch=torch.__version__, transformers=transformers.__version__, dtype=str(model.dtype))
    for length, task, drawn, method in cells(options, list(methods)):
        cell = {"model": name, "task": task, "length": length, "method": method}
        missing = [prompt for prompt in drawn if not log.has(**cell, prompt=prompt)]
        dense = log.mean(**{**cell, "method": DENSE})
        if not missing or (options.skip_failing and method != DENSE and dense is not None and dense < PASSES):
            continue
        if time.monotonic() > stop:
            print("out of time; the same command goes on", flush=True)
            return
        rows = judge(lm, prompts.load(task, length), task, length, missing, methods[method], options.chat)
        for prompt, row in zip(missing, rows, strict=True):
            log.write(**cell, prompt=prompt, **row)
        score = round(sum(row["score"] for row in rows) / len(rows), 3)
        print(*cell.values(), f"{len(rows)} prompts", score, rows[0]["density"], rows[0]["seconds"], flush=True)


if __name__ == "__main__":
    main()
