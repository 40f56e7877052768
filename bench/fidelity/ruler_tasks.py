"""The bed ``tasks``: RULER's task types, answered by the trained model of ``bench/ruler_model``.

Prompts are prefilled by a method, answers are decoded with dense attention.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel

from bench.fidelity.methods import Method
from bench.ruler_model.prompts import Prompts, make_prompts
from flexmask.block_masks import MASKS

FIRST_SEED = 90_000
_BATCH_TOKENS = 131072

Answer = Callable[[PreTrainedModel, Method | None, Tensor], tuple[Tensor, float]]


class Cell(NamedTuple):
    """Prompts of a task and length, so many from number `first` on. Every run draws the same prompt for a number."""

    task: str
    tokens: int
    prompts: int
    first: int = 0


class Log(Protocol):
    """Takes measurements, and knows those of earlier runs."""

    def has(self, method: str, item: str, number: int | None = None) -> bool:
        """True if an earlier run measured it, from this prompt on."""

    def write(self, **row: Any) -> None:
        """Add a line."""


def measure_tasks(
    model: PreTrainedModel,
    methods: dict[str, Method | None],
    plan: Sequence[Cell],
    answer: Answer,
    log: Log,
    stop: float,
) -> None:
    """Measure every method on every task and length; lengths in the order given, so that time runs out on the last ones.

    Parameters
    ----------
    model : PreTrainedModel
    methods : dict
        By name; None is dense attention.
    plan : sequence of Cell
        Tokens of a prompt are a multiple of 128.
    answer : callable
        Four greedy tokens after each prompt, (batch, 4), and the density of the prefill.
    log : Log
    stop : float
        No new measurement after this ``time.monotonic()``.
    """
    failed = set()
    for cell in plan:
        drawn: list[Prompts] = []
        item = f"{cell.task}/{cell.tokens}"
        for name, method in methods.items():
            if log.has(name, item, cell.first) or (name, cell.tokens) in failed:
                continue
            if time.monotonic() > stop:
                print("out of time before", name, item, flush=True)
                return
            drawn = drawn or _draw(cell, model.device)
            start = time.monotonic()
            try:
                each, kept = _answered(model, method, drawn, answer)
            except Exception as error:  # one method that fails must not end the run
                print("FAILED", name, item, repr(error)[:500], flush=True)
                log.write(bed="tasks", method=name, task=item, error=repr(error)[:500])
                failed.add((name, cell.tokens))
                continue
            figures = {"density": kept, **counted(each, drawn[0].answers.shape[1]), "first": cell.first, "each": each}
            if method is not None and method.name in MASKS and not method.compiled:
                figures["uncompiled"] = True
            log.write(bed="tasks", method=name, task=item, **figures, seconds=round(time.monotonic() - start, 3))


def counted(each: str, answer_tokens: int) -> dict[str, float]:
    """Whole answers right, prompts, and the share of right tokens, from the right tokens of each prompt."""
    found = [int(digit) for digit in each]
    parts = sum(found) / (answer_tokens * len(found))
    return {"right": found.count(answer_tokens), "n": len(found), "parts": parts, "answer_tokens": answer_tokens}


def _draw(cell: Cell, device: torch.device) -> list[Prompts]:
    """The cell's prompts in batches. Batches begin at fixed numbers and are drawn whole, so that a prompt goes by its number."""
    rows, end = max(1, _BATCH_TOKENS // cell.tokens), cell.first + cell.prompts
    drawn = []
    for at in range(cell.first // rows * rows, end, rows):
        prompts = make_prompts(cell.task, cell.tokens, rows, FIRST_SEED + at, device)
        chosen = slice(max(0, cell.first - at), end - at)
        drawn.append(Prompts(cell.task, prompts.token_ids[chosen], prompts.answers[chosen]))
    return drawn


def _answered(model: PreTrainedModel, method: Method | None, drawn: list[Prompts], answer: Answer) -> tuple[str, float]:
    """How many tokens of each prompt's answer are right, a digit each, and the mean density."""
    each, kept = [], []
    for prompts in drawn:
        found, share = answer(model, method, prompts.token_ids)
        each += prompts.parts_right(found).tolist()
        kept += [share] * len(prompts.token_ids)
    return "".join(map(str, each)), sum(kept) / len(kept)
