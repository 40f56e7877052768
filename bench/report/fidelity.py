"""Tables and figures of FIDELITY.md."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from bench.fidelity.lengths import ranges
from bench.intervals import density_at, of_mean, over_files, wilson
from bench.report.rows import FOLDER, NAMES, Curves, number, read, shown, usual
from bench.tables import markdown_table, thousands
from flexmask.plot import plot_frontier

DENSITIES = (0.1, 0.2, 0.3)
LENGTHS = (8192, 16384, 32768, 65536)
# the setting by which a method is compared over lengths
USUAL = {
    "hybrid": '{"gamma": 0.9}',
    "flexprefill": '{"gamma": 0.95}',
    "published": '{"gamma": 0.95}',
    "xattention": '{"threshold": 0.9}',
    "flash_prefill": '{"alpha": 0.1}',
}
# the error at which times are compared
EQUAL = 0.3
NEEDLES = [("needle-1", 16384), ("needle-64", 16384), ("needle-1", 32768)]
SCORED = 0.8  # least dense score of a task that methods are compared on
CHANGE = "mean change of a token's log-probability"
LENGTHS_COMMAND = "python -m bench.fidelity.lengths --texts DIR --out bench/results/lengths-gpu.csv"


def missing(command: str) -> list[str]:
    """Stands in for a table without rows."""
    return ["", f"*Not measured yet:* `{command}`", ""]


def language_model(length: int, folder: Path = FOLDER) -> pd.DataFrame:
    """Rows of whole prefills at a length: with YaRN 8 if there are any, else on test texts."""
    rows = read("lengths", folder)
    if rows.empty:
        return rows
    rows = usual(rows[(rows["length"] == length) & rows["chunk"].isna()])
    long = rows[rows["yarn"] == 8]
    return long if len(long) else rows[rows["text"].str.startswith("test/")]


def by_density(folder: Path = FOLDER) -> list[str]:
    """Change at a density, at 16k tokens."""
    rows = language_model(16384, folder)
    if rows.empty:
        return missing(LENGTHS_COMMAND)
    change, loss = Curves(rows, "abs_d"), Curves(rows, "d_loss")
    cells = []
    for method in shown(rows):
        low, high = change.interval_at(method, 0.2)
        found = [number(change.error_at(method, density)) for density in DENSITIES]
        found[1] += f" [{low:.2f}, {high:.2f}]" if np.isfinite(low) else ""
        cells.append([NAMES[method], *found, _linear(loss.settings(method), 0.2)])
    head = ["method", *(f"change at density {density}" for density in DENSITIES), "change of the loss at 0.2"]
    return markdown_table(head, cells)


def _linear(settings: np.ndarray, density: float) -> str:
    if len(settings) < 2 or not settings[0, 0] <= density <= settings[-1, 0]:
        return "-"
    return f"{np.interp(density, *settings.T):+.3f}"


def draw_by_density(axes: Any, folder: Path = FOLDER) -> bool:
    rows = language_model(16384, folder)
    curves = Curves(rows, "abs_d") if len(rows) else None
    drawn = {NAMES[name]: curves.settings(name).tolist() for name in shown(rows, 6)} if curves else {}
    if drawn:
        plot_frontier({name: points for name, points in drawn.items() if points}, axes, error=CHANGE, log=True)
        axes.set_xlim(0, 0.6)
    return bool(drawn)


def needle_rows(folder: Path) -> pd.DataFrame:
    """Density and share of needles found, of settings with all of `NEEDLES`."""
    rows = read("retrieval", folder)
    if rows.empty:
        return rows
    chosen = pd.MultiIndex.from_frame(rows[["task", "tokens"]]).isin(NEEDLES)
    rows = usual(rows[chosen & rows["chunk"].isna()]).drop_duplicates(["method", "options", "task", "tokens"], keep="last")
    by = rows.groupby(["method", "options"]).agg(
        tasks=("task", "size"), n=("n", "sum"), right=("right", "sum"), density=("density", "mean")
    )
    by = by[by["tasks"] == len(NEEDLES)].reset_index()
    return by.assign(found=by["right"] / by["n"])


def needles(folder: Path = FOLDER) -> list[str]:
    """Needles found, and RULER's tasks at 32k."""
    rows, tasks = needle_rows(folder), read("retrieval", folder)
    if rows.empty:
        return missing("python -m bench.fidelity.retrieval needles --curves --out bench/results/retrieval-gpu.csv")
    tasks = usual(tasks[(tasks["bed"] == "tasks") & (tasks["tokens"] == 32768) & tasks["each"].notna()])
    dense, cells = rows[rows["method"] == "dense"]["found"].max(), []
    for method in shown(rows):
        own = rows[rows["method"] == method].sort_values("density")
        every = own[own["found"] >= dense]
        fewest = number(every["density"].min(), 3) if len(every) else "never"
        least = own.iloc[0]
        at_least = f"{least['right']:.0f} of {least['n']:.0f} at {least['density']:.3f}"
        cells.append([NAMES[method], fewest, at_least, against_dense(tasks, method)])
    head = [
        "method",
        "lowest density that finds all",
        "found at the lowest density",
        "RULER's tasks at 32k, points against dense",
    ]
    return markdown_table(head, cells)


def against_dense(rows: pd.DataFrame, method: str, share: str = ".3f") -> str:
    """Mean score minus dense attention's over prompts, in points, of the setting with the most prompts."""
    scores = {
        key: _by_prompt(group) for key, group in rows[rows["method"].isin([method, "dense"])].groupby(["method", "options"])
    }
    dense = next((found for (name, _), found in scores.items() if name == "dense"), {})
    solved = {task for task in {task for task, _ in dense} if np.mean([v for (t, _), v in dense.items() if t == task]) >= SCORED}
    best: tuple[int, str] = (0, "-")
    for (name, options), found in scores.items():
        common = [key for key in found if key in dense and key[0] in solved]
        if name != method or len(common) <= best[0]:
            continue
        changes = [100 * (found[key] - dense[key]) for key in common]
        density = rows[(rows["method"] == method) & (rows["options"] == options)]["density"].mean()
        low, high = of_mean(changes)
        best = len(common), f"{np.mean(changes):+.1f} [{low:+.1f}, {high:+.1f}] at {density:{share}}"
    return best[1]


def _by_prompt(rows: pd.DataFrame) -> dict[tuple[str, int], float]:
    """Share of right answer tokens by task and number of the prompt."""
    return {
        (row.task, int(row.first) + at): int(digit) / row.answer_tokens
        for row in rows.itertuples()
        for at, digit in enumerate(_digits(row.each, int(row.n)))
    }


def _digits(each: object, count: int) -> str:
    # a column of digits may be read as numbers
    return str(each).removesuffix(".0").zfill(count)


def draw_needles(axes: Any, folder: Path = FOLDER) -> bool:
    rows = needle_rows(folder)
    drawn = {}
    for method in shown(rows, 6) if len(rows) else ():
        own = rows[rows["method"] == method]
        drawn[NAMES[method]] = list(zip(own["density"], 1 - own["found"], strict=True))
    if drawn:
        plot_frontier(drawn, axes, error="share of needles missed")
    return bool(drawn)


def by_length(folder: Path = FOLDER) -> list[str]:
    """One setting per method at every length."""
    rows = {length: language_model(length, folder) for length in LENGTHS}
    if any(found.empty for found in rows.values()):
        return missing(LENGTHS_COMMAND)
    cells = []
    for method, options in USUAL.items():
        own = [found[(found["method"] == method) & (found["options"] == options)] for found in rows.values()]
        setting = options.strip("{}").replace('"', "").replace(":", "")
        if all(len(each) for each in own):
            cells.append([f"{method}, {setting}", *map(_change, own)])
    return markdown_table(["method", *map(thousands, LENGTHS)], cells)


def _change(rows: pd.DataFrame) -> str:
    errors = rows["abs_d"].to_numpy()
    low, high = over_files(list(rows["text"]), lambda weights: float(weights @ errors))
    return f"{errors.mean():.2f} [{low:.2f}, {high:.2f}] at {rows['density'].mean():.3f}"


def at_equal_density(folder: Path = FOLDER) -> list[str]:
    """How much less hybrid changes than others, over the densities at which both were measured."""
    cells = []
    for other in ("flexprefill", "xattention"):
        curves = [Curves(language_model(length, folder), "abs_d") for length in LENGTHS]
        cells.append([f"against {other}", *(_less(each, other) for each in curves)])
    return markdown_table(["hybrid's change at equal density", *map(thousands, LENGTHS)], cells)


def _less(curves: Curves, other: str) -> str:
    def less(weights: np.ndarray | None = None) -> float:
        both = [curves.settings(method, weights)[:, 0] for method in ("hybrid", other)]
        if not all(len(each) for each in both):
            return float("nan")
        densities = np.linspace(max(each[0] for each in both), min(each[-1] for each in both), 20)[1:-1]
        ratios = [curves.error_at("hybrid", each, weights) / curves.error_at(other, each, weights) for each in densities]
        return 1 - float(np.mean(ratios))

    low, high = over_files(curves.texts, less)
    return "-" if np.isnan(less()) else f"{less():.0%} less [{low:.0%}, {high:.0%}]"


def draw_by_position(axes: Any, folder: Path = FOLDER) -> bool:
    rows = language_model(LENGTHS[-1], folder)
    columns = {name: f"abs_d {name}" for name in ranges()}
    for method, options in USUAL.items() if len(rows) else ():
        own = rows[(rows["method"] == method) & (rows["options"] == options)]
        if len(own):
            axes.plot(list(columns), [own[column].mean() for column in columns.values()], marker="o", label=NAMES[method])
    axes.set(xlabel="position of the token", ylabel=CHANGE)
    axes.set_ylim(bottom=0)
    if len(rows):
        axes.legend(frameon=False, fontsize=9)
    return bool(len(rows))


def _speeds(length: int, folder: Path) -> dict[str, tuple[float, float]]:
    """By method: density at the error `EQUAL`, and the call's speed-up over dense attention."""
    rows, speed = language_model(length, folder), read("speed", folder)
    if rows.empty or speed.empty:
        return {}
    calls = speed[(speed["what"] == "call") & (speed["input"] == "structured") & (speed["tokens"] == length)]
    calls = calls[(calls["measure"] == "eager_ms") & calls["backend"].isin(["flash", "cpu"])]
    curves, found = Curves(rows, "abs_d"), {}
    for method in shown(rows):
        settings = curves.settings(method)
        density = density_at(EQUAL, settings[:, 0], settings[:, 1]) if len(settings) > 1 else float("nan")
        own = calls[calls["method"] == method].dropna(subset=["density"]).sort_values("density")
        if len(own) < 2 or not own["density"].min() <= density <= own["density"].max():
            continue
        share = np.interp(density, own["density"], own["value"].astype(float) / own["fastest_value"].astype(float))
        found[method] = (density, 1 / float(share))
    return found


def draw_equal_error(axes: Any, folder: Path = FOLDER) -> bool:
    found = {length: each for length in LENGTHS[1:] if (each := _speeds(length, folder))}
    if len(found) < 2:
        return False
    for method in dict.fromkeys(method for each in found.values() for method in each):
        points = [(length, each[method][1]) for length, each in found.items() if method in each]
        axes.plot([length for length, _ in points], [value for _, value in points], marker="o", label=NAMES[method])
    axes.set_xscale("log", base=2)
    axes.set_xticks(list(found), [thousands(length) for length in found])
    axes.set(xlabel="tokens", ylabel="times as fast as the fastest dense kernel")
    axes.legend(frameon=False, fontsize=9)
    return True


def appendix(folder: Path = FOLDER) -> str:
    """The text of APPENDIX.md: means of every measured setting."""
    lines = ["# Every setting that was measured", "", "`python -m bench.report` writes this page from `bench/results/`.", ""]
    rows = read("lengths", folder)
    for (yarn, length), group in rows.groupby(["yarn", "length"]):
        lines += [f"## Language modelling, {length:,} tokens, YaRN {yarn:g}"]
        by = group.assign(chunk=group["chunk"].fillna(0)).groupby(["method", "options", "chunk"])[["density", "abs_d", "d_loss"]]
        means, counts = by.mean(), by.size()
        cells = []
        for (method, options, chunk), row in means.iterrows():
            of_chunk = f", chunks of {thousands(chunk)}" if chunk else ""
            texts = str(counts[method, options, chunk])
            cells.append(
                [
                    f"{method} `{options}`{of_chunk}",
                    texts,
                    number(row["density"], 3),
                    number(row["abs_d"], 3),
                    f"{row['d_loss']:+.3f}",
                ]
            )
        lines += markdown_table(["method", "texts", "density", "change", "change of the loss"], cells)
    rows = read("retrieval", folder)
    for (bed, tokens), group in rows.groupby(["bed", "tokens"]):
        lines += [f"## {bed.capitalize()}, {tokens:,} tokens"]
        cells = []
        for (method, options), own in group[group["chunk"].isna()].groupby(["method", "options"]):
            right, n = own["right"].sum(), own["n"].sum()
            low, high = wilson(right, n)
            share = f"{right:.0f} of {n:.0f} [{low:.2f}, {high:.2f}]"
            cells.append([f"{method} `{options}`", str(own["task"].nunique()), number(own["density"].mean(), 3), share])
        lines += markdown_table(["method", "tasks", "density", "whole answers right"], cells)
    rows = read("heads", folder)
    if len(rows):
        means = rows.groupby(["length", "method", "options"])[["density", "error"]].mean()
        lines += ["## Error of heads' outputs"]
        cells = [
            [thousands(length), f"{method} `{options}`", number(row["density"], 3), number(row["error"], 3)]
            for (length, method, options), row in means.iterrows()
        ]
        lines += markdown_table(["tokens", "method", "density", "error"], cells)
    return "\n".join(lines).rstrip() + "\n"


TABLES: dict[str, Callable[[Path], list[str]]] = {
    "by-density": by_density,
    "needles": needles,
    "by-length": by_length,
    "at-equal-density": at_equal_density,
}
FIGURES: dict[str, Callable[[Any, Path], bool]] = {
    "fidelity-by-density": draw_by_density,
    "fidelity-needles": draw_needles,
    "fidelity-by-position": draw_by_position,
    "fidelity-equal-error": draw_equal_error,
}
