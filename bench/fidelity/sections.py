"""Parts of the report beyond the tables of texts and needles; each is empty where its rows were not measured."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from bench.fidelity import attention_report, compare, draw, glance, heads, measures, statistics, tasks, times
from bench.fidelity.curves import CURVES, between, short, shown_name, signed
from bench.fidelity.measures import Measure
from bench.fidelity.results import PATH, Results, file_of_bed
from bench.fidelity.run import read_methods
from bench.reporting.tables import markdown_table

FOLDER = Path(__file__).parent
FIGURES = ("density", "dloss", "absd")
CHUNKED = "chunk="
# lines of a table that has a row
_WITH_A_ROW = 5


def all_measures(results: Results, texts: Sequence[str], path: Path = PATH) -> list[Measure]:
    """Every kind of error that was measured."""
    attention = measures.read_rows(file_of_bed("attention", path=path), "attention")
    return [*measures.of_texts(results, texts), *measures.of_attention(attention)]


def main_tables(found: Sequence[Measure], results: Results, path: Path = PATH) -> list[str]:
    """Language modelling, retrieval, and heads: one table each, and the pictures."""
    low, high = compare.AREA
    ruler = tasks.main_table(path)
    return [
        "## Language modelling: blocks for an equal error",
        "",
        "The density at which a method's error on the texts falls to a value, and the multiple of hybrid's density there.",
        *glance.equal_error(found[:2]),
        *draw.linked("fidelity-abs-d.png"),
        "",
        "## Retrieval: blocks that find the needle",
        "",
        "Three tasks of 24 prompts; densities are means over them.",
        *glance.needles(results),
        *(["## Retrieval: RULER's task types", "", *ruler] if ruler else []),
        "## Attention: errors of heads at equal density",
        "",
        "Means over all heads of SmolLM2, on dense attention's own queries and keys, so that no error adds to another.",
        *glance.heads(found),
        f"Mean of the error over densities of {low:g} to {high:g}, of methods whose settings reach both ends:",
        *compare.areas_table(found),
        *draw.linked("fidelity-output-error.png", "fidelity-areas.png"),
    ]


def equal_density(found: Sequence[Measure], results: Results) -> list[str]:
    """Every setting of every other method against hybrid's curve, and areas."""
    others = [setting for name, settings in CURVES.items() if name != "hybrid" for setting in settings]
    return [
        "## Errors at equal density",
        "",
        "Each setting's error over that of hybrid at the same density; of the loss, their difference. Bold: better than hybrid",
        "by more than the interval. A dash: hybrid's settings do not reach that density.",
        *compare.equal_density_table(found, results, [*others, "moa"], CURVES["hybrid"]),
    ]


def ablations(found: Sequence[Measure], results: Results) -> list[str]:
    """Options against the curve of the same selection with its defaults."""
    settings = [name for name in read_methods(FOLDER / "methods_ablations.txt") if CHUNKED not in name]
    table = compare.equal_density_table(found, results, settings, CURVES)
    lines = [
        "## Defaults and ablations",
        "",
        (FOLDER / "ablations.md").read_text(encoding="utf-8").rstrip(),
    ]
    return [*lines, *table] if len(table) >= _WITH_A_ROW else []


def fixed_budget(found: Sequence[Measure], results: Results) -> list[str]:
    """The paper's dynamic against fixed budgets: vertical-slash heads alone, of both kinds."""
    dynamic = [f"coverage:gamma={gamma},tau=0" for gamma in (0.8, 0.9, 0.95)]
    table = compare.equal_density_table(found, results, CURVES["vertical_slash"], dynamic)
    if len(table) < _WITH_A_ROW:
        return []
    return ["Fixed budgets of vertical-slash lines over budgets by gamma (coverage, tau 0), at equal density:", *table]


def chunks(results: Results, path: Path = PATH) -> list[str]:
    """Chunked prefill by the adapter against the whole one."""
    file = file_of_bed("chunks", path=path)
    rows, needles = measures.read_rows(file, "chunks"), measures.read_rows(file, "chunks", "task")
    texts = measures.common_texts(rows)
    if not texts:
        return []
    weights = statistics.bootstrap_weights(texts)
    drawn = {
        name: weights @ np.array([[by[text][figure] for figure in FIGURES] for text in texts])
        for name, by in rows.items()
        if set(texts) <= set(by)
    }
    table = []
    for name, draws in drawn.items():
        whole = drawn.get(name.partition(",")[0] + ", whole")
        cells = [name]
        for figure, shown in enumerate((short, signed, short)):
            cells.append(f"{shown(draws[0, figure])} {between(*statistics.interval(draws[1:, figure]), shown)}")
        ratio = None if whole is None or whole is draws else draws[:, 2] / whole[:, 2]
        cells.append("" if ratio is None else f"{ratio[0]:.2f}x {between(*statistics.interval(ratio[1:]))}")
        tasks = needles.get(name, {})
        cells.append("; ".join(f"{row['right']} of {row['n']} at {short(row['density'])}" for _, row in sorted(tasks.items())))
        table.append(cells)
    tasks_named = ", ".join(sorted({task for by in needles.values() for task in by}))
    head = ("selection, gamma", "density", "change of loss", "abs d", "abs d / whole", f"needles ({tasks_named})")
    return ["## Chunked against whole prefill", "", *markdown_table(head, table)]


def chunks_by_head(found: Sequence[Measure], results: Results) -> list[str]:
    """Chunks as methods: each chunk's choice over the keys so far, with everything else equal."""
    settings = [name for name in read_methods(FOLDER / "methods_ablations.txt") if CHUNKED in name]
    table = compare.equal_density_table(found, results, settings, CURVES)
    return table if len(table) >= _WITH_A_ROW else []


def tuned(results: Results, path: Path = PATH) -> list[str]:
    """A gamma for every head against one for all, and density at equal error."""
    made: list[str] = []
    for tokens in (16384, 8192):
        rows = measures.read_rows(file_of_bed("tuned", tokens, path), "tuned")
        texts = measures.common_texts(rows)
        if not texts:
            continue
        weights = statistics.bootstrap_weights(texts)
        table = []
        rows = {name: by for name, by in rows.items() if set(texts) <= set(by)}
        drawn = {name: weights @ np.array([[by[text][each] for each in FIGURES] for text in texts]) for name, by in rows.items()}
        for name, draws in drawn.items():
            uniform = drawn[name[name.index("gamma") :]]
            cells = [name]
            for figure, shown in enumerate((short, signed, short)):
                cells.append(f"{shown(draws[0, figure])} {between(*statistics.interval(draws[1:, figure]), shown)}")
            ratio = draws[:, 2] / uniform[:, 2]
            cells.append("" if uniform is draws else f"{ratio[0]:.2f}x {between(*statistics.interval(ratio[1:]))}")
            table.append(cells)
        made += [f"{tokens:,} tokens, {len(texts)} texts:"]
        made += markdown_table(("settings", "density", "change of loss", "abs d", "abs d / one gamma's"), table)
    return ["## A gamma for every head", "", *made] if made else []


def time(found: Sequence[Measure]) -> list[str]:
    """Errors at equal time."""
    lines = times.lines(found[0])
    return ["## Errors at equal time", "", *lines] if lines else []


def by_head(path: Path = PATH) -> list[str]:
    """Heads in which another method errs less than ours."""
    figures = heads.read(path)
    if heads.OURS not in figures:
        return []
    title = "Heads whose output errs most under hybrid selection:"
    pictures = draw.linked("fidelity-densities.png", "fidelity-distances.png", "fidelity-patterns.png")
    return ["## By layer and head", "", *heads.beaten(figures), "", title, *heads.worst_table(figures), *pictures]


def lengths(path: Path = PATH) -> list[str]:
    """The same texts, read at half the length."""
    tokens = 8192
    file = file_of_bed("texts", tokens, path)
    rows = measures.read_rows(file, "texts")
    texts = measures.common_texts({name: by for name, by in rows.items() if name != "dense"})
    if not texts:
        return []
    weights = statistics.bootstrap_weights(texts)
    table = []
    for name in (setting for settings in CURVES.values() for setting in settings):
        by = rows.get(name, {})
        if set(texts) <= set(by):
            draws = weights @ np.array([[by[text][figure] for figure in FIGURES] for text in texts])
            shown = zip(range(len(FIGURES)), (short, signed, short), strict=True)
            cells = [f"{show(draws[0, at])} {between(*statistics.interval(draws[1:, at]), show)}" for at, show in shown]
            table.append([shown_name(name), *cells])
    head = ("method", "density", "change of loss", "abs d")
    return [f"## The texts' first {tokens:,} tokens, without YaRN", *markdown_table(head, table)]


def attention(path: Path = PATH) -> list[str]:
    """Attention kept and output errors, head by head."""
    rows = measures.read_rows(file_of_bed("attention", path=path), "attention")
    return ["## Attention level", "", *attention_report.report(rows)[0]] if rows else []
