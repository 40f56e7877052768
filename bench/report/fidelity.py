"""Tables of archive/EARLIER.md and of equal error, and a figure."""

from __future__ import annotations

from itertools import cycle
from pathlib import Path
from typing import Any

import pandas as pd

from bench.intervals import over_files
from bench.report import LINES
from bench.report.rows import ERROR, FOLDER, NAMES, Curves, interval, number, percent, read, usual
from bench.report.speed import call_rows, speed_up, times
from bench.tables import markdown_table, thousands

LENGTHS = (8192, 16384, 32768, 65536)


def at_gamma(gamma: float) -> str:
    """Options of hybrid's rows without a floor."""
    return f'{{"gamma": {gamma}, "min_coverage": 0.0}}'


DEFAULT = at_gamma(0.9)
GAMMAS = (0.8, 0.85, 0.9, 0.95, 0.98)
OTHERS = ("flexprefill", "xattention")  # the next best


def language_model(length: int, folder: Path = FOLDER, yarn: int = 8, model: str = "SmolLM2-135M") -> pd.DataFrame:
    """Rows of a model's whole prefills at a length with a factor of YaRN, under usual settings."""
    rows = read("lengths", folder)
    chosen = (rows["model"] == model) & (rows["length"] == length) & (rows["yarn"] == yarn)
    return usual(rows[chosen & rows["chunk"].isna()])


def hybrid_at(rows: pd.DataFrame, options: str = DEFAULT) -> pd.DataFrame:
    """Rows of hybrid under some options."""
    return rows[(rows["method"] == "hybrid") & (rows["options"] == options)]


def mean_of(rows: pd.DataFrame, figure: str, form: str) -> str:
    """Mean over texts with its interval."""
    values = rows[figure].to_numpy()
    return f"{values.mean():{form}}{interval(*over_files(list(rows['text']), lambda weights: float(weights @ values)), form)}"


def _against_others(label: str, named: dict[str, tuple[int, str]], folder: Path, yarn: int = 8) -> list[str]:
    """A row each: hybrid at a length under some options, and the errors of others at as many blocks."""
    cells = []
    for name, (length, options) in named.items():
        rows = language_model(length, folder, yarn)
        own, curves = hybrid_at(rows, options), Curves(rows)
        errors = [number(curves.error_at(other, own["density"].mean())) for other in OTHERS]
        figures = [mean_of(own, "abs_d", ".2f"), mean_of(own, "d_loss", "+.3f"), *errors]
        cells.append([name, percent(own["density"].mean()), *figures])
    others = [f"{other}'s {ERROR} at this density" for other in OTHERS]
    return markdown_table([label, "density", ERROR, "change of the loss", *others], cells)


def settings(folder: Path = FOLDER) -> list[str]:
    """Hybrid by gamma at 16k tokens."""
    return _against_others("gamma", {str(gamma): (16384, at_gamma(gamma)) for gamma in GAMMAS}, folder)


def by_length(folder: Path = FOLDER) -> list[str]:
    """Hybrid's default setting at every length."""
    return _against_others("tokens", {thousands(length): (length, DEFAULT) for length in LENGTHS}, folder)


def stretched(folder: Path = FOLDER) -> list[str]:
    """The same with YaRN factor 16, which 128k tokens need."""
    return _against_others("tokens", {thousands(length): (length, DEFAULT) for length in (65536, 131072)}, folder, yarn=16)


def gains(folder: Path = FOLDER) -> list[str]:
    """Calls at equal error under the earlier rule: hybrid's default setting, and flexprefill at the error that it has."""
    cells, calls = [], call_rows(folder, torch="2.11.0+cu130")
    for length in LENGTHS[1:]:
        rows, at_length = language_model(length, folder), calls[calls["tokens"] == length]
        own = hybrid_at(rows)[["density", "abs_d"]].mean()
        others = Curves(rows).density_at("flexprefill", own["abs_d"])
        for method, at, density in (("hybrid", "gamma 0.9", own["density"]), ("flexprefill", "at the same error", others)):
            ratio = speed_up(at_length[at_length["method"] == method], density)
            cells.append([f"{length:,}", f"`{method}`, {at}", percent(density), times(ratio), number(own["abs_d"])])
    return markdown_table(["tokens", "method", "density", "speed-up", ERROR], cells)


def draw_by_density(axes: Any, folder: Path = FOLDER, **of_model: Any) -> None:
    """All methods measured, on SmolLM2 and 16k tokens by default, hybrid without its floor; a ring at hybrid's default."""
    every = language_model(**{"length": 16384, "folder": folder, **of_model})
    rows = every[~every["options"].str.contains('"min_coverage": 0.5')]
    curves, measured = Curves(rows), set(rows["method"]) - {"dense", "causal"}
    methods = [*(name for name in NAMES if name in measured), *sorted(measured - set(NAMES))]
    for method, (colour, marker, dash) in zip(methods, cycle(LINES), strict=False):
        densities, errors = curves.settings(method)
        style: dict[str, Any] = {"color": colour, "marker": marker, "linestyle": dash, "markersize": 5}
        name = "hybrid (ours), without its floor" if method == "hybrid" else NAMES.get(method, method)
        axes.plot(100 * densities, errors, label=name, linewidth=2.5 if method == "hybrid" else 1.3, **style)
    default = hybrid_at(every, '{"gamma": 0.9, "min_coverage": 0.5}')
    density, error = (default if len(default) else hybrid_at(rows))[["density", "abs_d"]].mean()
    axes.plot(100 * density, error, "o", color="black", markersize=11, fillstyle="none")
    at = {"textcoords": "offset points", "ha": "right", "va": "top"}
    axes.annotate("ring: the default" if len(default) else "ring: gamma 0.9", (100 * density, error), (-12, -16), **at)
    names = {"xlabel": "density, %", "ylabel": "|Δ log p|: mean change of a log-probability, log scale"}
    axes.set(**names, xlim=(0, min(60, 105 * rows["density"].max())), yscale="log")
    axes.minorticks_off()
    ticks = [0.05, 0.1, 0.2, 0.3, 0.4, 0.6, 0.8]
    axes.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.grid(color="#dddddd", linewidth=0.6)
    axes.legend(frameon=False, fontsize=9, loc="upper right")


TABLES = {"settings": settings, "by-length": by_length, "stretched": stretched, "gains": gains}
