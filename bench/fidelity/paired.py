"""Two methods on the same prompts: the difference of their scores with its interval, prompt by prompt."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bench.fidelity import statistics
from bench.fidelity.measures import Rows
from bench.fidelity.ruler_tasks import counted

Scores = Mapping[int, float]
"""By a prompt's number the share of its answer that is right"""


@dataclass(frozen=True)
class Difference:
    """Mean over tasks of a score less another one.

    Attributes
    ----------
    mean, low, high
        With the 95% interval.
    worse, better
        Prompts that score less, and more.
    prompts
        All of them.
    tasks
    """

    mean: float
    low: float
    high: float
    worse: int
    better: int
    prompts: int
    tasks: int


def joined(path: Path) -> Rows:
    """Rows of the bed ``tasks`` by method and task, rounds of prompts put together; none if there is no such file.

    A row whose prompts are known one by one has ``scores``; rows that tell only how many are right count where there are no
    others.
    """
    rounds: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        row = json.loads(line)
        if row["bed"] == "tasks" and "error" not in row:
            rounds.setdefault((row["method"], row["task"]), []).append(row)
    found: Rows = {}
    for (method, task), rows in rounds.items():
        known = [row for row in rows if "each" in row]
        found.setdefault(method, {})[task] = _together(known) if known else rows[-1]
    return found


def _together(rounds: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One row of several, a prompt that was asked twice counted once."""
    digits: dict[int, str] = {}
    densities: dict[int, float] = {}
    for row in rounds:
        numbers = range(row["first"], row["first"] + row["n"])
        digits.update(zip(numbers, row["each"], strict=True))
        densities.update(dict.fromkeys(numbers, row["density"]))
    tokens = rounds[0]["answer_tokens"]
    density = sum(densities.values()) / len(densities)
    scores = {number: int(digit) / tokens for number, digit in digits.items()}
    return {**rounds[-1], "density": density, **counted("".join(digits.values()), tokens), "scores": scores}


def difference(scores: Mapping[str, Scores], base: Mapping[str, Scores], draws: int = statistics.DRAWS) -> Difference | None:
    """Compare two methods' scores by task on the prompts that both were asked; None if a task has none.

    The interval comes from a bootstrap that draws the prompts of each task with replacement, the same for both methods. Where
    no prompt scores differently, it is what so many prompts leave open (a share of 0, Clopper and Pearson).
    """
    means, drawn, worse, better, prompts = [], np.zeros(draws), 0, 0, 0
    for number, task in enumerate(scores):
        common = sorted(scores[task].keys() & base.get(task, {}).keys())
        if not common:
            return None
        each = np.array([scores[task][at] - base[task][at] for at in common])
        means.append(each.mean())
        drawn += _weights(len(each), draws, number) @ each
        worse, better, prompts = worse + int((each < 0).sum()), better + int((each > 0).sum()), prompts + len(each)
    if not means:
        return None
    if worse + better == 0:
        open_share = 1 - 0.025 ** (1 / prompts)
        return Difference(0.0, -open_share, open_share, 0, 0, prompts, len(means))
    low, high = statistics.interval(drawn / len(means))
    return Difference(float(np.mean(means)), low, high, worse, better, prompts, len(means))


@functools.cache
def _weights(prompts: int, draws: int, seed: int) -> np.ndarray:
    """Weights of means over prompts drawn with replacement, (draws, prompts)."""
    counts = np.random.default_rng(seed).multinomial(prompts, np.full(prompts, 1 / prompts), size=draws)
    return np.asarray(counts / prompts)


def scores_of(rows: Rows, name: str, items: Sequence[str]) -> dict[str, Scores] | None:
    """A method's scores by task; None unless the prompts of every task are known one by one."""
    found = {item: rows.get(name, {}).get(item, {}).get("scores") for item in items}
    return None if any(scores is None for scores in found.values()) else {item: scores or {} for item, scores in found.items()}


def density_of(rows: Rows, name: str, items: Sequence[str]) -> float:
    """Mean over tasks."""
    return sum(float(rows[name][item]["density"]) for item in items) / len(items)


def at_density(rows: Rows, settings: Sequence[str], items: Sequence[str], density: float) -> dict[str, Scores] | None:
    """Scores of a curve at a density, each prompt's linear between the two settings next to it.

    The setting with the most blocks stands in for higher densities. None below the lowest one.
    """
    found = [(density_of(rows, name, items), scores) for name in settings if (scores := scores_of(rows, name, items))]
    found.sort(key=lambda each: each[0])
    if not found or density < found[0][0]:
        return None
    above = next((number for number, (at, _) in enumerate(found) if at >= density), None)
    if above is None or above == 0:
        return found[-1 if above is None else 0][1]
    (low, fewer), (high, more) = found[above - 1 : above + 1]
    share = (density - low) / (high - low) if high > low else 1.0
    return {
        item: {
            at: (1 - share) * fewer[item][at] + share * more[item][at] for at in sorted(fewer[item].keys() & more[item].keys())
        }
        for item in items
    }
