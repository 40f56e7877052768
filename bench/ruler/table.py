"""The table of RULER.md: ``python -m bench.ruler.table FILE.jsonl ...``.

Counts prompts that every method has run. Scores are in percent with 95% intervals (Wilson's where a prompt is right or wrong,
else bootstrap); differences to dense attention are paired. Tasks with a dense score below 80% are not scored.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from bench.intervals import of_mean, wilson
from bench.rows import read_rows

DENSE = "dense"
KEPT = "everything kept"
PASSES = 0.8  # the least dense score at which a task is scored
_GROUP = ["model", "length", "task"]


def score(scores: pd.Series) -> str:
    """Mean with interval, in percent."""
    whole = scores.isin([0, 1]).all()
    low, high = wilson(scores.sum(), len(scores)) if whole else of_mean(scores)
    return f"{100 * scores.mean():.1f} ({100 * low:.0f} to {100 * high:.0f})"


def difference(changes: pd.Series) -> str:
    """Mean paired difference with interval; none if all are zero."""
    if not changes.any():
        return f"none in {len(changes)}"
    low, high = of_mean(changes)
    return f"{100 * changes.mean():+.1f} ({100 * low:+.0f} to {100 * high:+.0f})"


def lines(rows: pd.DataFrame) -> list[str]:
    """The table, the tasks that are not scored, and the number of answers equal to dense ones where everything was kept."""
    table = [
        "| model | tokens | task | prompts | method | blocks kept | score | minus dense |",
        "|---|---|---|---|---|---|---|---|",
    ]
    same, failed = [], []
    for (model, length, task), group in rows.groupby(_GROUP, sort=False):
        methods = list(dict.fromkeys(group["method"]))
        by = group.drop_duplicates(["method", "prompt"], keep="last").pivot(index="prompt", columns="method")
        scores = by["score"][methods].dropna()
        if DENSE not in methods or scores.empty:
            continue
        if scores[DENSE].mean() < PASSES and KEPT not in methods:
            failed.append(f"{task} at {length:,} ({100 * scores[DENSE].mean():.1f})")
            continue
        for method in methods:
            named = (model, f"{length:,}", task, str(len(scores)))
            kept = by["density"][method][scores.index]
            density = "" if kept.isna().any() else f"{kept.mean():.0%}"
            change = difference(scores[method] - scores[DENSE]) if method != DENSE else ""
            table.append("| " + " | ".join((*named, method, density, score(scores[method]), change)) + " |")
        if KEPT in methods:
            answers = by["answer"].loc[scores.index]
            same.append(f"{task}, {length:,}: {(answers[KEPT] == answers[DENSE]).sum()} of {len(answers)} answers the same")
    if failed:
        table += ["", f"Not scored (dense score): {', '.join(failed)}."]
    return [*table, *same]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", type=Path, nargs="+", help="what bench.ruler.run wrote")
    rows = [row for file in parser.parse_args(arguments).files for row in read_rows(file) if "task" in row]
    print("\n".join(lines(pd.DataFrame(rows, columns=[*_GROUP, "method", "prompt", "score", "density", "answer"]))))


if __name__ == "__main__":
    main()
