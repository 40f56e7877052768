"""APPENDIX.md: every measured setting, one figure per cell, for tables that sort and filter."""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd

from bench.intervals import over_files, wilson
from bench.report.fidelity import scored_settings, task_rows
from bench.report.rows import ERROR, FOLDER, RULES, number, percent, read
from bench.report.speed import milliseconds
from bench.tables import markdown_table

HEAD = f"""# Every setting that was measured

`python -m bench.report` writes this page from `bench/results/` ([what the columns mean](results/README.md)). Click a heading
to sort, type to filter. `rule` is that of hybrid's rows: `ships`, or an older one.
{ERROR.replace(chr(92), "")} is the mean absolute change of a token's log-probability against dense attention.
"""


def method_and_rule(method: str) -> list[str]:
    return [method.partition(",")[0], RULES.get(method, "-")]


def in_words(options: str) -> str:
    """Options without the marks of JSON: ``gamma 0.9, min_budget 256``; tuned gammas by layer as ``by layer``."""
    given = json.loads(options)
    by_layer = ["by layer"] if given.pop("layers", None) else []
    return ", ".join([f"{name} {value}" for name, value in given.items()] + by_layer) or "-"


def _text(value: object) -> str:
    return "-" if pd.isna(value) else f"{value:,.0f}" if isinstance(value, (int, float)) else str(value)


def language(folder: Path) -> list[str]:
    rows = read("lengths", folder)
    rows = rows.assign(chunk=rows["chunk"].fillna(0))
    cells = []
    for (yarn, length, method, options, chunk), own in rows.groupby(["yarn", "length", "method", "options", "chunk"]):
        errors = own["abs_d"].to_numpy()
        low, high = over_files(list(own["text"]), lambda weights, errors=errors: float(weights @ errors))  # type: ignore[misc]  # a default
        figures = [percent(own["density"].mean()), number(own["abs_d"].mean(), 3), number(low, 3), number(high, 3)]
        where = [f"{yarn:g}", f"{length:,}", *method_and_rule(method), in_words(options), _text(chunk or float("nan"))]
        cells.append([*where, str(len(own)), *figures, f"{own['d_loss'].mean():+.3f}"])
    head = [
        "YaRN",
        "tokens",
        "method",
        "rule",
        "options",
        "chunk",
        "texts",
        "blocks kept",
        ERROR,
        "low",
        "high",
        "change of loss",
    ]
    return ["## Language modelling", *markdown_table(head, cells)]


def answers(folder: Path) -> list[str]:
    rows = read("retrieval", folder)
    cells = []
    for (bed, task, tokens, method, options), own in rows[rows["chunk"].isna()].groupby(
        ["bed", "task", "tokens", "method", "options"]
    ):
        right, n = own["right"].sum(), own["n"].sum()
        low, high = wilson(right, n)
        what = ["needles" if bed == "needles" else "RULER", task, f"{tokens:,}", *method_and_rule(method), in_words(options)]
        cells.append([*what, percent(own["density"].mean()), f"{n:.0f}", percent(right / n), percent(low), percent(high)])
    head = ["test", "task", "tokens", "method", "rule", "options", "blocks kept", "prompts", "right", "low", "high"]
    return ["## Needles and RULER's tasks: whole answers right", *markdown_table(head, cells)]


def points(folder: Path) -> list[str]:
    cells = []
    for tokens in sorted(read("retrieval", folder).query("bed == 'tasks'")["tokens"].unique()):
        for method, options, prompts, density, mean, low, high in scored_settings(task_rows(folder, tokens)):
            figures = [f"{value:+.1f}" for value in (mean, low, high)]
            named = [*method_and_rule(method), in_words(options)]
            cells.append([f"{tokens:,}", *named, str(prompts), percent(density), *figures])
    head = ["tokens", "method", "rule", "options", "prompts", "blocks kept", "points against dense", "low", "high"]
    return ["## RULER's tasks against dense attention", *markdown_table(head, cells)]


def heads(folder: Path) -> list[str]:
    rows = read("heads", folder)
    rows = rows.assign(source=rows["input"].str.split("/").str[0])
    means = rows.groupby(["source", "length", "method", "options"])[["density", "error"]].mean()
    cells = [
        [source, f"{length:,}", *method_and_rule(method), in_words(options), percent(row["density"]), number(row["error"], 3)]
        for (source, length, method, options), row in means.iterrows()
    ]
    head = ["input", "tokens", "method", "rule", "options", "blocks kept", "error of head outputs"]
    return ["## Head outputs", *markdown_table(head, cells)]


def times(folder: Path) -> list[str]:
    rows = read("speed", folder)
    rows = rows[rows["part"].isin(["latency", "equal error"]) & rows["measure"].isin(["eager_ms", "graph_ms"])]
    cells = []
    for row in rows.sort_values(["what", "input", "tokens", "method", "density"], kind="stable").itertuples():
        value = float(row.value)
        gain = "-" if pd.isna(row.fastest_value) else f"{float(row.fastest_value) / value:.2f}x"
        method = ["dense", "-"] if pd.isna(row.method) else method_and_rule(row.method)
        against = "-" if pd.isna(row.fastest) else row.fastest.removeprefix("dense ")
        kind = "graph" if row.measure == "graph_ms" else "plain"
        named = [row.what, row.input, f"{row.tokens:,}", *method, in_words(row.options), _text(row.backend), kind]
        cells.append([*named, percent(row.density), milliseconds(value), gain, against, row.date])
    head = ["timed", "input", "tokens", "method", "rule", "options", "backend", "launch", "blocks kept", "ms", "speed-up"]
    return ["## Times", *markdown_table([*head, "over the dense kernel", "date"], cells)]


def appendix(folder: Path = FOLDER) -> str:
    """All rows as Markdown."""
    parts = {"lengths": [language], "retrieval": [points, answers], "heads": [heads], "speed": [times]}
    lines = [HEAD]
    for kind, writers in parts.items():
        if len(read(kind, folder)):
            lines += [line for write in writers for line in write(folder)]
    return "\n".join(lines).rstrip() + "\n"
