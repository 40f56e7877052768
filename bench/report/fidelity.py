"""Tables of FIDELITY.md, and the table and a figure of README.md."""

from __future__ import annotations

from collections.abc import Callable
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from bench.intervals import of_mean, over_files
from bench.report.rows import ERROR, FOLDER, NAMES, Curves, interval, number, percent, read, shown, usual
from bench.report.speed import call_rows, speed_up, times
from bench.tables import markdown_table, thousands
from flexmask.pictures.style import LINES

YARN = 8
LENGTHS = (8192, 16384, 32768, 65536)
DEFAULT = '{"gamma": 0.9}'  # of hybrid
GAMMAS = (0.8, 0.85, 0.9, 0.95, 0.98)
OTHERS = ("flexprefill", "xattention")  # the next best
NEEDLES = [("needle-1", 16384), ("needle-64", 16384), ("needle-1", 32768)]
SCORED = 0.8  # least dense score of a task that methods are compared on


def language_model(length: int, folder: Path = FOLDER) -> pd.DataFrame:
    """Rows of whole prefills at a length, under usual settings."""
    rows = read("lengths", folder)
    return usual(rows[(rows["length"] == length) & (rows["yarn"] == YARN) & rows["chunk"].isna()])


def mean_of(rows: pd.DataFrame, figure: str, form: str = ".2f") -> str:
    """Mean over texts with its interval."""
    values = rows[figure].to_numpy()
    found = over_files(list(rows["text"]), lambda weights: float(weights @ values))
    return f"{values.mean():{form}}{interval(*found, form)}"


def _against_others(label: str, named: dict[str, tuple[pd.DataFrame, str]]) -> list[str]:
    """A row each: hybrid under some options among the rows of a length, and the errors of others at as many blocks."""
    cells = []
    for name, (rows, options) in named.items():
        own = rows[(rows["method"] == "hybrid") & (rows["options"] == options)]
        density, curves = own["density"].mean(), Curves(rows, "abs_d")
        errors = [number(curves.error_at(other, density)) for other in OTHERS]
        cells.append([name, percent(density), mean_of(own, "abs_d"), mean_of(own, "d_loss", "+.3f"), *errors])
    others = [f"{other}'s {ERROR} at as many blocks" for other in OTHERS]
    return markdown_table([label, "blocks kept", ERROR, "change of the loss", *others], cells)


def settings(folder: Path = FOLDER) -> list[str]:
    """Hybrid by gamma at 16k tokens."""
    rows = language_model(16384, folder)
    return _against_others("gamma", {str(gamma): (rows, f'{{"gamma": {gamma}}}') for gamma in GAMMAS})


def by_length(folder: Path = FOLDER) -> list[str]:
    """Hybrid's default setting at every length."""
    return _against_others("tokens", {thousands(length): (language_model(length, folder), DEFAULT) for length in LENGTHS})


def gains(folder: Path = FOLDER) -> list[str]:
    """README's table: hybrid's default setting, and flexprefill at the same error."""
    cells, calls = [], call_rows(folder)
    for length in LENGTHS[2:]:
        rows, at_length = language_model(length, folder), calls[calls["tokens"] == length]
        own = rows[(rows["method"] == "hybrid") & (rows["options"] == DEFAULT)]
        error = own["abs_d"].mean()
        others = Curves(rows, "abs_d").density_at("flexprefill", error)
        named = (("hybrid", ", gamma 0.9", own["density"].mean()), ("flexprefill", ", at the same error", others))
        for method, at, density in named:
            ratio = speed_up(at_length[at_length["method"] == method], density)
            cells.append([f"{length:,}", f"`{method}`{at}", percent(density), times(ratio), number(error)])
    return markdown_table(["tokens", "method", "blocks kept", "speed-up", ERROR], cells)


def needle_rows(folder: Path) -> pd.DataFrame:
    """Density and share of needles found, of settings with all of `NEEDLES`."""
    rows = read("retrieval", folder)
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


def draw_by_density(axes: Any, folder: Path = FOLDER) -> None:
    """All methods measured at 16k tokens; hybrid's name at its line, and a ring at its default."""
    rows = language_model(16384, folder)
    curves = Curves(rows, "abs_d")
    for method, (colour, marker, dash) in zip(shown(rows), cycle(LINES), strict=False):
        points, width = curves.settings(method), 2.5 if method == "hybrid" else 1.3
        style: dict[str, Any] = {"color": colour, "marker": marker, "linestyle": dash, "markersize": 5, "linewidth": width}
        if len(points):
            axes.plot(100 * points[:, 0], points[:, 1], label=NAMES.get(method, method), **style)
    default = rows[(rows["method"] == "hybrid") & (rows["options"] == DEFAULT)]
    point = (100 * default["density"].mean(), default["abs_d"].mean())
    axes.plot(*point, "o", color="black", markersize=11, fillstyle="none")
    axes.annotate("hybrid (ours)\nring: gamma 0.9", point, (-12, -16), textcoords="offset points", ha="right", va="top")
    names = {"xlabel": "blocks kept, %", "ylabel": "|Δ log p|: mean change of a token's log-probability"}
    axes.set(**names, xlim=(0, 60), yscale="log")
    axes.minorticks_off()
    ticks = [0.1, 0.2, 0.3, 0.4, 0.6, 0.8]
    axes.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.grid(color="#dddddd", linewidth=0.6)
    axes.legend(frameon=False, fontsize=9, loc="upper right")


TABLES: dict[str, Callable[[Path], list[str]]] = {
    "settings": settings,
    "by-length": by_length,
    "gains": gains,
}
