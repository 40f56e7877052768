"""The report's part on RULER's task types: every method's answers by length, on average and task by task."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from bench.fidelity import paired, statistics
from bench.fidelity.curves import BEFORE, short, shown_name
from bench.fidelity.measures import Rows
from bench.fidelity.results import PATH, file_of_bed
from bench.reporting.tables import markdown_table, thousands

# a task that dense attention solves less often is reported and not scored
SCORED = 0.8
# tasks that every method was asked at most lengths
LOOKUPS = ("single", "multi_key_8", "multi_key_64", "multi_key_512", "multi_value", "multi_query", "tracking")
# of them, those that a paired comparison needs at least
ENOUGH = 6
# the model's own limit: longer prompts are read with its rotary embedding stretched
TRAINED = 65536
OLDER = '"Hybrid before" is the rule before its last query block kept [twice the floor](#defaults-and-ablations).'
# columns of the table by task
SHOWN = (
    *("hybrid:gamma=0.9", "coverage:gamma=0.9", "published:gamma=0.9", "xattention:threshold=0.9", "flash_prefill:alpha=0.1"),
    "streaming_llm:sink_blocks=1,window_blocks=16",
)


def lengths_of(rows: Rows) -> list[int]:
    """Tokens of the prompts, ascending."""
    return sorted({int(item.rpartition("/")[2]) for item in rows.get("dense", {})})


def length_name(tokens: int) -> str:
    """A column's length, and how the model reaches it."""
    return thousands(tokens) + (" by YaRN" if tokens > TRAINED else "")


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
    return markdown_table(("method", *(f"{length_name(tokens)}, {len(items)} tasks" for tokens, items in columns.items())), shown)


def asked(rows: Rows, name: str, tokens: int) -> list[str]:
    """Scored tasks of a length that the method and dense attention were asked prompt by prompt; none with few lookups."""
    known = [item for item in scored(rows, tokens) if all(paired.scores_of(rows, each, [item]) for each in (name, "dense"))]
    lookups = [item for item in known if item.rpartition("/")[0] in LOOKUPS]
    return known if len(lookups) >= ENOUGH else []


def points(found: paired.Difference, mark: bool = True) -> str:
    """A difference in points with its interval; bold, if marked, where the method scores more by more than that."""
    text = f"{100 * found.mean:+.1f} [{100 * found.low:+.1f}, {100 * found.high:+.1f}]"
    return f"**{text}**" if mark and found.low > 0 else text


def against_dense_table(rows: Rows) -> list[str]:
    """A row a method, a column a length: its score less dense attention's on the same prompts."""
    lengths, shown = [tokens for tokens in lengths_of(rows) if asked(rows, "dense", tokens)], []
    for name in rows:
        cells = [_against_dense(rows, name, tokens) for tokens in lengths]
        if name != "dense" and any(cells):
            shown.append([shown_name(name), *cells])
    return markdown_table(("method", *map(length_name, lengths)), shown)


def _against_dense(rows: Rows, name: str, tokens: int) -> str:
    items = asked(rows, name, tokens)
    scores, dense = (paired.scores_of(rows, each, items) for each in (name, "dense"))
    found = paired.difference(scores, dense) if scores and dense else None
    if found is None:
        return ""
    density = short(paired.density_of(rows, name, items))
    counts = f"{found.worse} worse, {found.better} better of {found.prompts} in {found.tasks} tasks"
    return f"{points(found)} at {density}; {counts}"


def equal_density_table(rows: Rows) -> list[str]:
    """A row a method that is not ours, a column a length: its score less hybrid's at the same density, on the same prompts."""
    curve = [name for name in rows if name.startswith("hybrid:gamma=") and "," not in name]
    others = [name for name in rows if name.partition(":")[0] not in ("dense", "hybrid", BEFORE, "rule")]
    lengths = [
        tokens
        for tokens in lengths_of(rows)
        if any(asked(rows, name, tokens) for name in curve) and any(asked(rows, name, tokens) for name in others)
    ]
    shown = []
    for name in others:
        cells = [_at_equal_density(rows, name, curve, tokens) for tokens in lengths]
        if any(cells):
            shown.append([shown_name(name), *cells])
    return markdown_table(("method", *map(length_name, lengths)), shown)


def _at_equal_density(rows: Rows, name: str, curve: Sequence[str], tokens: int) -> str:
    items = asked(rows, name, tokens)
    scores = paired.scores_of(rows, name, items) if items else None
    if not scores:
        return ""
    density = paired.density_of(rows, name, items)
    base = paired.at_density(rows, curve, items, density)
    found = paired.difference(scores, base) if base else None
    if found is None:
        return f"fewer blocks, {short(density)}"
    densest = max(paired.density_of(rows, each, items) for each in curve if paired.scores_of(rows, each, items))
    if density > densest:  # no setting of hybrid's keeps as many
        return f"{points(found, mark=False)} at {short(density)}, hybrid at {short(densest)}"
    return f"{points(found)} at {short(density)}"


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
            shown.append([task, length_name(tokens), whole, *rest])
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
    rows = paired.joined(file_of_bed("tasks", path=path))
    if "dense" not in rows:
        return []
    return [
        "Ten task types, answered by the model of [ruler_model/](ruler_model/README.md) that was trained on them: RULER's score,",
        f"the share of an answer that is right, mean over the tasks at which dense attention scores {100 * SCORED:.0f} or more,",
        "and the density.",
        *averages_table(rows),
        *([OLDER] if any(name.startswith(f"{BEFORE}:") for name in rows) else []),
        "The same of the seven tasks that look values up, which more methods and settings were asked:",
        *averages_table(rows, LOOKUPS),
        *_paired(rows),
    ]


def _paired(rows: Rows) -> list[str]:
    """Both comparisons prompt by prompt; nothing where no prompt's own answer is known."""
    if not any(asked(rows, "dense", tokens) for tokens in lengths_of(rows)):
        return []
    return [
        "Against dense attention on the same prompts, in points: the mean over tasks, at the method's density, and the prompts",
        "that score less and more. Intervals come from a bootstrap over prompts.",
        *against_dense_table(rows),
        "Against hybrid at the same density: each prompt's score between hybrid's settings next to it, or of its densest one",
        "where a method keeps more. Bold: more than hybrid by more than the interval, at equal density.",
        *equal_density_table(rows),
    ]


def details(path: Path = PATH) -> list[str]:
    """Task by task; nothing where the bed was not measured."""
    rows = paired.joined(file_of_bed("tasks", path=path))
    title = "## RULER's task types one by one"
    return [title, "", "Whole answers right; RULER's score, at the density.", *by_task_table(rows)] if "dense" in rows else []
