"""Answers after a sparse prefill: ``python -m bench.fidelity.retrieval needles --out FILE.csv``, or ``tasks``.

``needles`` are of the retriever, ``tasks`` RULER's types by `bench.ruler_model`. Decoding is dense. Every method gets the
same prompts, by number; a row has one digit per prompt, its right tokens. The same command resumes, and ``--first 96`` takes
other prompts. A method that was edited keeps its rows: give it another name, or another file.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from bench.fidelity import settings, smollm
from bench.fidelity.settings import Setting
from bench.fidelity.sparse_model import SparseModel
from bench.prompts.captured import MODEL as RETRIEVER
from bench.retriever.task import make_prompt
from bench.rows import Sheet
from bench.ruler_model.answers import MODEL as RULER_MODEL
from bench.ruler_model.prompts import TASKS, Prompts, make_prompts

NEEDLES = ("needle-1", "needle-64")
IDENTITY = ("bed", "task", "tokens", "method", "options", "chunk", "first", "n")
COLUMNS = (*IDENTITY, "density", "right", "parts", "answer_tokens", "each", "seconds", "device")
DENSE = Setting("dense", {})
_FIRST_SEEDS = {"needles": 1000, "tasks": 90_000}
_BATCH_TOKENS = 131072


def draw(bed: str, task: str, tokens: int, first: int, count: int, device: torch.device) -> list[Prompts]:
    """Prompts from number `first` on; batches begin at fixed numbers, so a number always means the same prompt."""
    rows, drawn = max(1, _BATCH_TOKENS // tokens), []
    for at in range(first // rows * rows, first + count, rows):
        seed = _FIRST_SEEDS[bed] + at
        if bed == "tasks":
            batch = make_prompts(task, tokens, rows, seed, device)
        else:
            every = [make_prompt(tokens, int(task.rpartition("-")[2]), 1, seed + row) for row in range(rows)]
            ids, answers = (torch.stack([getattr(each, name) for each in every]).to(device) for name in ("token_ids", "answers"))
            batch = Prompts(task, ids, answers[:, 0])
        taken = slice(max(0, first - at), first + count - at)
        drawn.append(Prompts(task, batch.token_ids[taken], batch.answers[taken]))
    return drawn


def score(model: SparseModel, setting: Setting, drawn: Sequence[Prompts], chunk: int | None = None) -> dict[str, Any]:
    """Right answers of a setting, and the density of its prefills."""
    counts, kept = [], []
    for prompts in drawn:
        answer_tokens = prompts.answers.shape[1]
        found = model.answers(None if setting == DENSE else setting, prompts.token_ids, answer_tokens, chunk)
        counts += prompts.parts_right(found).tolist()
        kept += [model.density()] * len(prompts.token_ids)
    parts = sum(counts) / (answer_tokens * len(counts))
    found_all = {"density": sum(kept) / len(kept), "right": counts.count(answer_tokens), "parts": parts}
    return found_all | {"answer_tokens": answer_tokens, "each": "".join(map(str, counts))}


def measure(model: SparseModel, chosen: Sequence[Setting], options: argparse.Namespace, sheet: Sheet) -> None:
    stop, device = time.monotonic() + 60 * options.minutes, model.model.device
    where = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    for tokens, task in itertools.product(options.lengths, options.tasks):
        bed = options.bed if options.model is None else f"{options.bed}, {options.name}"
        cell = {"bed": bed, "task": task, "tokens": tokens, "chunk": options.chunk, "first": options.first, "n": options.prompts}
        drawn: list[Prompts] = []
        for setting in (DENSE, *chosen):
            if sheet.has(**cell, method=setting.method, options=setting.options):
                print(f"{task}, {tokens:,}, {setting}: known, not measured again", flush=True)
                continue
            if time.monotonic() > stop:
                print("out of time; the same command goes on", flush=True)
                return
            drawn = drawn or draw(options.bed, task, tokens, options.first, options.prompts, device)
            start = time.monotonic()
            try:
                found = score(model, setting, drawn, options.chunk)
            except Exception as error:  # one method that fails must not end the run
                print(f"FAILED {setting}, {task}, {tokens:,} tokens: {error!r}"[:600], flush=True)
                continue
            seconds = round(time.monotonic() - start, 3)
            sheet.add(**cell, method=setting.method, options=setting.options, **found, seconds=seconds, device=where)
            print(
                f"{task}, {tokens:,}, {setting}: {found['right']} of {options.prompts} at {found['density']:.1%} of the blocks",
                flush=True,
            )


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bed", choices=tuple(_FIRST_SEEDS))
    parser.add_argument("--out", type=Path, required=True, help="CSV file that rows are added to")
    parser.add_argument("--tasks", help=f"needles: {','.join(NEEDLES)}; tasks: {','.join(TASKS)}")
    parser.add_argument("--lengths", default="16384,32768,8192,65536", help="tokens of a prompt, most wanted first")
    parser.add_argument("--prompts", type=int, default=24, help="of each task and length (24)")
    parser.add_argument("--first", type=int, default=0, help="number of the first prompt (0)")
    parser.add_argument("--chunk", type=int, help="prefill in chunks of so many tokens, a multiple of 128")
    parser.add_argument("--model", type=Path, help="folder of another model for the bed, whose name the rows have beside it")
    parser.add_argument("--name", help="of --model in the rows; none: that of its folder")
    parser.add_argument("--minutes", type=float, default=60.0, help="no new measurement after that (60)")
    settings.add_arguments(parser)
    options = parser.parse_args(arguments)
    if options.prompts < 1 or options.first < 0:
        parser.error(f"--prompts must be at least 1 and --first at least 0; got {options.prompts} and {options.first}")
    options.name = options.name if options.name is not None else smollm.name_of(options.model)
    if not options.name.strip():
        parser.error(f"--name must be the model's in the rows, as {options.model} says none")
    options.lengths = [int(length) for length in options.lengths.split(",")]
    options.tasks = options.tasks.split(",") if options.tasks else NEEDLES if options.bed == "needles" else TASKS
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    chosen, sheet = settings.chosen(options), Sheet(options.out, COLUMNS, IDENTITY)
    device, dtype = ("cuda", torch.bfloat16) if torch.cuda.is_available() else ("cpu", torch.float32)
    folder = options.model or (RETRIEVER if options.bed == "needles" else RULER_MODEL)
    loaded: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    measure(SparseModel(loaded.to(device).eval()), chosen, options, sheet)


if __name__ == "__main__":
    main()
