"""The table of RULER.md from the lines that ``bench.ruler.run`` wrote: ``python -m bench.ruler.table FILE.jsonl ...``.

Only prompts that every method has run count, so that methods are compared on the same ones. Scores are in percent with 95%
intervals: Wilson's where each prompt is right or wrong, else from a bootstrap over prompts. The last column is
the paired difference to dense attention with its bootstrap interval. Where the dense model itself fails, differences say
nothing: below 80% a task is named with its dense score, and no method is scored on it.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from bench.retriever.right_padding import interval

DENSE = "dense"
KEPT = "everything kept"
PASSES = 0.8  # the least dense score at which a task is scored
_DRAWS = 10_000


class Cell(NamedTuple):
    """One method on one task and length."""

    scores: np.ndarray  # (prompts,)
    density: float | None  # None where it was not measured
    answers: list[str]


Group = tuple[str, int, str]  # model, length, task


def cells(rows: Iterable[dict[str, Any]]) -> dict[Group, dict[str, Cell]]:
    """By model, length and task, then by method: prompts that all methods there have."""
    found: dict[Group, dict[str, dict[int, dict[str, Any]]]] = defaultdict(lambda: defaultdict(dict))
    for row in rows:
        if "task" in row:
            found[row["model"], row["length"], row["task"]][row["method"]][row["prompt"]] = row
    result = {}
    for group, methods in found.items():
        common = sorted(set.intersection(*(set(prompts) for prompts in methods.values())))
        if common and DENSE in methods:
            result[group] = {
                method: Cell(
                    np.array([prompts[each]["score"] for each in common], dtype=float),
                    mean_density([prompts[each]["density"] for each in common]),
                    [prompts[each].get("answer", "") for each in common],
                )
                for method, prompts in methods.items()
            }
    return result


def mean_density(densities: Sequence[float | None]) -> float | None:
    """Mean over prompts, if all of them have one."""
    known = [each for each in densities if each is not None]
    return float(np.mean(known)) if len(known) == len(densities) else None


def bootstrap(values: np.ndarray, seed: int = 0) -> tuple[float, float]:
    """95% interval of the mean, by percentiles of resampled means."""
    draws = np.random.default_rng(seed).integers(len(values), size=(_DRAWS, len(values)))
    low, high = np.percentile(values[draws].mean(1), [2.5, 97.5])
    return float(low), float(high)


def score_interval(scores: np.ndarray) -> tuple[float, float]:
    """95% interval of a mean score."""
    if np.isin(scores, (0.0, 1.0)).all():
        return interval(int(scores.sum()), len(scores))
    return bootstrap(scores)


def difference(changes: np.ndarray) -> str:
    """Mean paired difference with its interval; of no difference at all, a bootstrap knows no interval."""
    if not changes.any():
        return f"none in {len(changes)}"
    low, high = bootstrap(changes)
    return f"{100 * changes.mean():+.1f} ({100 * low:+.0f} to {100 * high:+.0f})"


def lines(found: dict[Group, dict[str, Cell]]) -> list[str]:
    """The table in Markdown."""
    table = ["| model | tokens | task | prompts | method | density | score | minus dense |", "|---|---|---|---|---|---|---|---|"]
    for (model, length, task), methods in found.items():
        dense = methods[DENSE].scores
        scored = dense.mean() >= PASSES or KEPT in methods
        for method, cell in methods.items():
            if method != DENSE and not scored:
                continue
            low, high = score_interval(cell.scores)
            score = f"{100 * cell.scores.mean():.1f} ({100 * low:.0f} to {100 * high:.0f})"
            change = difference(cell.scores - dense) if method != DENSE else "" if scored else "not scored"
            named = (model, f"{length:,}", task, str(len(dense))) if method == DENSE else ("", "", "", "")
            density = "" if cell.density is None else f"{cell.density:.2f}"
            table.append("| " + " | ".join((*named, method, density, score, change)) + " |")
    return table


def same_answers(found: dict[Group, dict[str, Cell]]) -> list[str]:
    """A line for each task run with everything kept: in how many prompts the answer is the dense one, letter by letter."""
    result = []
    for (_, length, task), methods in found.items():
        if KEPT in methods:
            pairs = list(zip(methods[KEPT].answers, methods[DENSE].answers, strict=True))
            result.append(f"{task}, {length:,}: {sum(one == other for one, other in pairs)} of {len(pairs)} answers the same")
    return result


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", type=Path, nargs="+", help="what bench.ruler.run wrote")
    files = parser.parse_args(arguments).files
    rows = (json.loads(line) for file in files for line in file.read_text(encoding="utf-8").splitlines())
    found = cells(rows)
    print("\n".join([*lines(found), *same_answers(found)]))


if __name__ == "__main__":
    main()
