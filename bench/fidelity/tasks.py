"""The report's part on RULER's task types: every method's answers by length, on average and task by task."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from bench.fidelity import statistics
from bench.fidelity.curves import short, shown_name
from bench.fidelity.measures import Rows, read_rows
from bench.fidelity.results import PATH, file_of_bed
from bench.reporting.tables import markdown_table, thousands

# a task that dense attention solves less often is reported and not scored
SCORED = 0.8
# tasks that every method was asked at most lengths
LOOKUPS = ("single", "multi_key_8", "multi_key_64", "multi_key_512", "multi_value", "multi_query", "tracking")
# columns of the table by task
SHOWN = (
    *("hybrid:gamma=0.9", "coverage:gamma=0.9", "published:gamma=0.9", "xattention:threshold=0.9", "flash_prefill:alpha=0.1"),
    "streaming_llm:sink_blocks=1,window_blocks=16",
)


def lengths_of(rows: Rows) -> list[int]:
    """Tokens of the prompts, ascending."""
    return sorted({int(item.rpartition("/")[2]) for item in rows.get("dense", {})})


def score(row: dict[str, float]) -> float:
    """RULER's own: the share of an answer's tokens that are right, mean over prompts."""
    return row.get("parts", row["right"] / row["n"])


def scored(rows: Rows, tokens: int) -> list[str]:
    """Tasks of a length that dense attention solves."""
    return [item for item, row in rows.get("dense", {}).items() if item.endswith(f"/{tokens}") and score(row) >= SCORED]


def average(rows: Rows, name: str, items: Sequence[str]) -> str:
    """Mean score with the interval of all prompts together, and the mean density; "" unless every task ran."""
    found = rows.get(name, {})
    if not items or any(item not in found for item in items):
        return ""
    each = [found[item] for item in items]
    mean = sum(map(score, each)) / len(each)
    # of right answers, which are harder to get than parts of one: no narrower than the score's own
    low, high = statistics.wilson(mean * sum(row["n"] for row in each), sum(row["n"] for row in each))
    density = sum(row["density"] for row in each) / len(each)
    return f"{100 * mean:.1f} [{100 * low:.1f}, {100 * high:.1f}] at {short(density)}"


def averages_table(rows: Rows, among: Sequence[str] = ()) -> list[str]:
    """A row a method, a column a length: the mean over the tasks that are scored there, only those named if any are."""
    columns = {tokens: scored(rows, tokens) for tokens in lengths_of(rows)}
    if among:
        columns = {tokens: [item for item in items if item.rpartition("/")[0] in among] for tokens, items in columns.items()}
    columns = {tokens: items for tokens, items in columns.items() if items}
    cells = {name: [average(rows, name, items) for items in columns.values()] for name in rows}
    shown = [["dense" if name == "dense" else shown_name(name), *each] for name, each in cells.items() if any(each)]
    return markdown_table(("method", *(f"{thousands(tokens)}, {len(items)} tasks" for tokens, items in columns.items())), shown)


def by_task_table(rows: Rows) -> list[str]:
    """A row a task and length: dense attention, and the main methods where it solves the task."""
    methods = [name for name in SHOWN if name in rows]
    shown = []
    for tokens in lengths_of(rows):
        known = scored(rows, tokens)
        for item, dense in rows["dense"].items():
            task, _, length = item.rpartition("/")
            if length != str(tokens):
                continue
            low, high = statistics.wilson(dense["right"], dense["n"])
            whole = f"{dense['right']} of {dense['n']} [{short(low)}, {short(high)}]; {100 * score(dense):.1f}"
            rest = (
                [answers(rows[name].get(item)) for name in methods]
                if item in known
                else ["not scored", *[""] * (len(methods) - 1)]
            )
            shown.append([task, thousands(tokens), whole, *rest])
    return markdown_table(("task", "tokens", "dense", *map(shown_name, methods)), shown)


def answers(row: dict[str, float] | None) -> str:
    """Right answers with Wilson's interval and the density."""
    if row is None:
        return ""
    low, high = statistics.wilson(int(row["right"]), int(row["n"]))
    return (
        f"{row['right']:.0f} of {row['n']:.0f} [{short(low)}, {short(high)}]; {100 * score(row):.1f} at {short(row['density'])}"
    )


def main_table(path: Path = PATH) -> list[str]:
    """The averages with a sentence; nothing where the bed was not measured."""
    rows = read_rows(file_of_bed("tasks", path=path), "tasks", "task")
    if "dense" not in rows:
        return []
    return [
        "Ten task types, answered by the model of [ruler_model/](ruler_model/README.md) that was trained on them: RULER's score,",
        f"the share of an answer that is right, mean over the tasks at which dense attention scores {100 * SCORED:.0f} or more,",
        "and the density.",
        *averages_table(rows),
        "The same of the seven tasks that look values up, which more methods and settings were asked:",
        *averages_table(rows, LOOKUPS),
    ]


def details(path: Path = PATH) -> list[str]:
    """Task by task; nothing where the bed was not measured."""
    rows = read_rows(file_of_bed("tasks", path=path), "tasks", "task")
    title = "## RULER's task types one by one"
    return [title, "", "Whole answers right; RULER's score, at the density.", *by_task_table(rows)] if "dense" in rows else []
