"""Tables and figures of FIDELITY.md, and the table of README.md."""

from __future__ import annotations

from collections.abc import Callable
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from bench.fidelity.lengths import ranges
from bench.intervals import of_mean, over_files
from bench.report.rows import ERROR, FOLDER, NAMES, Curves, interval, number, own_rows, percent, read, shown, usual
from bench.report.speed import call_rows, speed_up, times
from bench.tables import markdown_table, thousands
from flexmask.pictures.style import LINES

YARN = 8
LENGTHS = (8192, 16384, 32768, 65536)
DEFAULT = '{"gamma": 0.9}'  # of hybrid
GAMMAS = (0.8, 0.85, 0.9, 0.95, 0.98)
OTHERS = ("flexprefill", "xattention")  # the next best
MAIN = ("hybrid", "flexprefill", "published", "xattention", "flash_prefill")
# the setting of each method in the figure by position
BY_POSITION = {
    "hybrid": DEFAULT,
    "flexprefill": '{"gamma": 0.95}',
    "published": '{"gamma": 0.95}',
    "xattention": '{"threshold": 0.9}',
    "flash_prefill": '{"alpha": 0.1}',
}
EQUAL = 0.3  # the error at which times are compared
NEEDLES = [("needle-1", 16384), ("needle-64", 16384), ("needle-1", 32768)]
SCORED = 0.8  # least dense score of a task that methods are compared on
AXIS = "|Δ log p|: mean change of a token's log-probability"
KEPT = "blocks kept, %"
COMMAND = "python -m bench.fidelity.lengths --texts DIR --out bench/results/lengths-gpu.csv"


def missing(command: str = COMMAND) -> list[str]:
    """Stands in for a table without rows."""
    return ["", f"*Not measured yet:* `{command}`", ""]


def language_model(length: int, folder: Path = FOLDER) -> pd.DataFrame:
    """Rows of whole prefills at a length, under usual settings."""
    rows = read("lengths", folder)
    return usual(rows[(rows["length"] == length) & (rows["yarn"] == YARN) & rows["chunk"].isna()]) if len(rows) else rows


def mean_of(rows: pd.DataFrame, figure: str, form: str = ".2f") -> str:
    """Mean over texts with its interval."""
    values = rows[figure].to_numpy()
    found = over_files(list(rows["text"]), lambda weights: float(weights @ values))
    return f"{values.mean():{form}}{interval(*found, form)}"


def settings(folder: Path = FOLDER) -> list[str]:
    """Hybrid by gamma at 16k tokens, and the errors of others at as many blocks."""
    rows = language_model(16384, folder)
    if rows.empty:
        return missing()
    curves, cells = Curves(rows, "abs_d"), []
    for gamma in GAMMAS:
        own = rows[(rows["method"] == "hybrid") & (rows["options"] == f'{{"gamma": {gamma}}}')]
        if len(own):
            density = own["density"].mean()
            errors = [number(curves.error_at(other, density)) for other in OTHERS]
            cells.append([str(gamma), percent(density), mean_of(own, "abs_d"), mean_of(own, "d_loss", "+.3f"), *errors])
    return markdown_table(["gamma", "blocks kept", ERROR, "change of the loss", *_at_as_many()], cells)


def _at_as_many() -> list[str]:
    return [f"{other}'s {ERROR} at as many blocks" for other in OTHERS]


def by_length(folder: Path = FOLDER) -> list[str]:
    """Hybrid's default setting at every length, and the errors of others at as many blocks."""
    cells = []
    for length in LENGTHS:
        rows = language_model(length, folder)
        if rows.empty:
            return missing()
        own = rows[(rows["method"] == "hybrid") & (rows["options"] == DEFAULT)]
        density, curves = own["density"].mean(), Curves(rows, "abs_d")
        errors = [number(curves.error_at(other, density)) for other in OTHERS]
        cells.append([thousands(length), percent(density), mean_of(own, "abs_d"), mean_of(own, "d_loss", "+.3f"), *errors])
    return markdown_table(["tokens", "blocks kept", ERROR, "change of the loss", *_at_as_many()], cells)


def gains(folder: Path = FOLDER) -> list[str]:
    """README's table: hybrid's default setting, and flexprefill at the same error."""
    cells, calls = [], call_rows(folder)
    for length in LENGTHS[2:]:
        rows = language_model(length, folder)
        if rows.empty:
            return missing()
        own, at_length = rows[(rows["method"] == "hybrid") & (rows["options"] == DEFAULT)], calls[calls["tokens"] == length]
        error, rule = own["abs_d"].mean(), own_rows(at_length, "hybrid", 2)
        kept = [own["density"].mean(), Curves(rows, "abs_d").density_at("flexprefill", error)]
        gain = [
            speed_up(at_length[at_length["method"] == method], density)
            for method, density in zip((rule, "flexprefill"), kept, strict=True)
        ]
        if not np.isnan(gain).any():
            note = "" if rule == "hybrid" else "; timed with an [older rule](bench/results/README.md#rules-of-hybrid)"
            names = [f"`hybrid`, gamma 0.9 (the default{note})", "`flexprefill`, at the same error"]
            for name, density, ratio in zip(names, kept, gain, strict=True):
                cells.append([f"{length:,}", name, percent(density), times(ratio), number(error)])
    return markdown_table(["tokens", "method", "blocks kept", "speed-up", ERROR], cells)


def draw_by_density(axes: Any, folder: Path = FOLDER) -> bool:
    """All methods measured at 16k tokens; hybrid's name at its line, and a ring at its default."""
    rows = language_model(16384, folder)
    curves = Curves(rows, "abs_d") if len(rows) else None
    if curves is None:
        return False
    for method, style in zip(shown(rows), cycle(LINES), strict=False):
        points = curves.settings(method)
        if len(points):
            _line(axes, 100 * points[:, 0], points[:, 1], NAMES.get(method, method), style, method == "hybrid")
    default = rows[(rows["method"] == "hybrid") & (rows["options"] == DEFAULT)]
    if len(default):
        point = (100 * default["density"].mean(), default["abs_d"].mean())
        axes.plot(*point, "o", color="black", markersize=11, fillstyle="none")
        axes.annotate("hybrid (ours)\nring: gamma 0.9", point, (-12, -16), textcoords="offset points", ha="right", va="top")
    axes.set(xlabel=KEPT, ylabel=AXIS, xlim=(0, 60), yscale="log")
    axes.minorticks_off()
    ticks = [0.1, 0.2, 0.3, 0.4, 0.6, 0.8]
    axes.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.grid(color="#dddddd", linewidth=0.6)
    axes.legend(frameon=False, fontsize=9, loc="upper right")
    return True


def _line(axes: Any, x: Any, y: Any, label: str, style: tuple[str, str, str], bold: bool) -> None:
    colour, marker, dash = style
    axes.plot(x, y, color=colour, marker=marker, linestyle=dash, label=label, markersize=5, linewidth=2.5 if bold else 1.3)


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


def fewest_blocks(rows: pd.DataFrame, method: str) -> float:
    """Lowest density at which a method finds every needle that dense attention finds; NaN if it never does."""
    enough = rows["found"] >= rows[rows["method"] == "dense"]["found"].max()
    return float(rows[(rows["method"] == method) & enough]["density"].min())


def needles(folder: Path = FOLDER) -> list[str]:
    """Needles found, and RULER's tasks at 32k."""
    rows = needle_rows(folder)
    if rows.empty:
        return missing("python -m bench.fidelity.retrieval needles --curves --out bench/results/retrieval-gpu.csv")
    tasks, cells = task_rows(folder, 32768), []
    for method in (name for name in MAIN if name in set(rows["method"])):
        points, density = against_dense(tasks, method)
        cells.append([NAMES.get(method, method), percent(fewest_blocks(rows, method)), points, density])
    head = ["method", "fewest blocks that find every needle", "RULER at 32k: points against dense", "RULER: blocks kept"]
    return markdown_table(head, cells)


def task_rows(folder: Path, tokens: int) -> pd.DataFrame:
    """Rows of RULER's task types at a length, with their scores by prompt."""
    rows = read("retrieval", folder)
    return usual(rows[(rows["bed"] == "tasks") & (rows["tokens"] == tokens) & rows["each"].notna() & rows["chunk"].isna()])


def scored_settings(rows: pd.DataFrame) -> list[tuple[str, str, int, float, float, float, float]]:
    """Method, options, prompts, density, points against dense attention with their interval, of every setting."""
    scores = {key: _by_prompt(group) for key, group in rows.groupby(["method", "options"])}
    dense = next((found for (name, _), found in scores.items() if name == "dense"), {})
    solved = {task for task in {task for task, _ in dense} if np.mean([v for (t, _), v in dense.items() if t == task]) >= SCORED}
    found = []
    for (method, options), own in scores.items():
        common = [key for key in own if key in dense and key[0] in solved]
        if method != "dense" and common:
            changes = [100 * (own[key] - dense[key]) for key in common]
            density = rows[(rows["method"] == method) & (rows["options"] == options)]["density"].mean()
            found.append((method, options, len(common), float(density), float(np.mean(changes)), *of_mean(changes)))
    return found


def against_dense(rows: pd.DataFrame, method: str) -> tuple[str, str]:
    """Points against dense attention, and density, of a method's setting with the most prompts; hybrid's is its default."""
    own = [each for each in scored_settings(rows) if each[0] == method and (method != "hybrid" or each[1] == DEFAULT)]
    if not own:
        return "-", "-"
    _, _, _, density, points, low, high = max(own, key=lambda each: each[2])
    return f"{points:+.1f}{interval(low, high, '+.1f')}", percent(density)


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
    methods = [name for name in (*MAIN, "streaming_llm") if len(rows) and name in set(rows["method"])]
    for method, style in zip(methods, LINES, strict=False):
        own = rows[rows["method"] == method].sort_values("density")
        _line(axes, 100 * own["density"], 100 * (1 - own["found"]), NAMES.get(method, method), style, method == "hybrid")
    axes.set(xlabel=KEPT, ylabel="needles missed, %", xlim=(0, None), ylim=(0, None))
    axes.grid(color="#dddddd", linewidth=0.6)
    if methods:
        axes.legend(frameon=False, fontsize=9)
    return bool(methods)


def draw_by_position(axes: Any, folder: Path = FOLDER) -> bool:
    rows = language_model(LENGTHS[-1], folder)
    columns = {name: f"abs_d {name}" for name in ranges()}
    for (method, options), style in zip(BY_POSITION.items() if len(rows) else (), LINES, strict=False):
        own = rows[(rows["method"] == method) & (rows["options"] == options)]
        if len(own):
            label = f"{NAMES.get(method, method)}, {own['density'].mean():.0%} of the blocks"
            _line(axes, list(columns), [own[column].mean() for column in columns.values()], label, style, method == "hybrid")
    axes.set(xlabel="position of the token", ylabel=AXIS)
    axes.set_ylim(bottom=0)
    if len(rows):
        axes.legend(frameon=False, fontsize=9)
    return bool(len(rows))


def _speeds(length: int, folder: Path) -> dict[str, float]:
    """By method: the call's speed-up over dense attention at the density where its error is `EQUAL`."""
    rows, calls = language_model(length, folder), call_rows(folder)
    if rows.empty or calls.empty:
        return {}
    curves, calls, found = Curves(rows, "abs_d"), calls[calls["tokens"] == length], {}
    for method in shown(rows):
        gain = speed_up(calls[calls["method"] == own_rows(calls, method, 2)], curves.density_at(method, EQUAL))
        if not np.isnan(gain):
            found[method] = gain
    return found


def draw_equal_error(axes: Any, folder: Path = FOLDER) -> bool:
    """Methods with a speed-up at two lengths or more; nothing if hybrid is not among them."""
    found = {length: each for length in LENGTHS[1:] if (each := _speeds(length, folder))}
    lines = {
        method: [(length, each[method]) for length, each in found.items() if method in each]
        for method in dict.fromkeys(method for each in found.values() for method in each)
    }
    lines = {method: points for method, points in lines.items() if len(points) > 1}
    if "hybrid" not in lines:
        return False
    for (method, points), style in zip(lines.items(), LINES, strict=False):
        tokens, gains_at = zip(*points, strict=True)
        _line(axes, tokens, gains_at, NAMES.get(method, method), style, method == "hybrid")
    axes.set_xscale("log", base=2)
    axes.set_xticks(list(found), [thousands(length) for length in found])
    axes.set(xlabel="tokens", ylabel="speed-up over the fastest dense kernel")
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False, fontsize=9)
    return True


TABLES: dict[str, Callable[[Path], list[str]]] = {
    "settings": settings,
    "needles": needles,
    "by-length": by_length,
    "gains": gains,
}
FIGURES: dict[str, Callable[[Any, Path], bool]] = {
    "fidelity-by-density": draw_by_density,
    "fidelity-needles": draw_needles,
    "fidelity-by-position": draw_by_position,
    "fidelity-equal-error": draw_equal_error,
}
