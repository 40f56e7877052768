"""The bed ``tasks``: RULER's task types, answered by the trained model of ``bench/ruler_model``.

Prompts are prefilled by a method, answers are decoded with dense attention.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel

from bench.fidelity.methods import Method
from bench.ruler_model.prompts import Prompts, make_prompts
from flexmask.block_masks import MASKS

FIRST_SEED = 90_000
_BATCH_TOKENS = 131072

Answer = Callable[[PreTrainedModel, Method | None, Tensor], tuple[Tensor, float]]


class Log(Protocol):
    """Takes measurements, and knows those of earlier runs."""

    def has(self, method: str, item: str) -> bool:
        """True if an earlier run measured it."""

    def write(self, **row: Any) -> None:
        """Add a line."""


def measure_tasks(
    model: PreTrainedModel,
    methods: dict[str, Method | None],
    plan: Sequence[tuple[str, int, int]],
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
    plan : sequence of (task, tokens, prompts)
        Tokens of a prompt are a multiple of 128.
    answer : callable
        Four greedy tokens after each prompt, (batch, 4), and the density of the prefill.
    log : Log
    stop : float
        No new measurement after this ``time.monotonic()``.
    """
    failed = set()
    for task, tokens, count in plan:
        drawn: list[Prompts] = []
        for name, method in methods.items():
            item = f"{task}/{tokens}"
            if log.has(name, item) or (name, tokens) in failed:
                continue
            if time.monotonic() > stop:
                print("out of time before", name, item, flush=True)
                return
            drawn = drawn or _draw(task, tokens, count, model.device)
            start = time.monotonic()
            try:
                right, parts, kept = _answered(model, method, drawn, answer)
            except Exception as error:  # one method that fails must not end the run
                print("FAILED", name, item, repr(error)[:500], flush=True)
                log.write(bed="tasks", method=name, task=item, error=repr(error)[:500])
                failed.add((name, tokens))
                continue
            figures = {"density": kept, "right": right, "n": count, "parts": parts}
            if method is not None and method.name in MASKS and not method.compiled:
                figures["uncompiled"] = True
            log.write(bed="tasks", method=name, task=item, **figures, seconds=round(time.monotonic() - start, 3))


def _draw(task: str, tokens: int, count: int, device: torch.device) -> list[Prompts]:
    rows = max(1, _BATCH_TOKENS // tokens)
    return [make_prompts(task, tokens, min(rows, count - at), FIRST_SEED + at, device) for at in range(0, count, rows)]


def _answered(model: PreTrainedModel, method: Method | None, drawn: list[Prompts], answer: Answer) -> tuple[int, float, float]:
    """Right answers, the share of right tokens, and the mean density."""
    right, parts, kept = 0, [], []
    for prompts in drawn:
        found, share = answer(model, method, prompts.token_ids)
        tokens = prompts.answers.shape[1]
        each = prompts.parts_right(found)
        right += int((each == tokens).sum())
        parts += (each / tokens).tolist()
        kept += [share] * len(each)
    return right, sum(parts) / len(parts), sum(kept) / len(kept)
