"""The report's pictures: errors by density on texts and of heads' outputs, areas under curves, and maps by layer and head."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from bench.fidelity import compare, heads, statistics
from bench.fidelity.curves import CURVES, NAMES
from bench.fidelity.measures import Measure
from bench.fidelity.results import PATH
from flexmask.pictures.style import EDGE
from flexmask.plot import plot_frontier

FOLDER = PATH.parent
DRAWN = ("hybrid", "coverage", "published", "xattention", "flash_prefill", "streaming_llm")
AXES = {"abs d": "mean change of a token's log-probability", "output error": "output error: ||o - o_dense|| / ||o_dense||"}
# what each shows, for readers who do not see it
PICTURES = {
    "fidelity-abs-d.png": "Mean change of a token's log-probability by density, a line a method",
    "fidelity-output-error.png": "Relative error of heads' outputs by density, a line a method",
    "fidelity-areas.png": "Areas under the methods' curves, bars with intervals",
    "fidelity-densities.png": "Density by layer and head, coverage and hybrid",
    "fidelity-distances.png": "Jensen-Shannon distance by layer and head",
    "fidelity-patterns.png": "Share of query-aware heads by layer",
}


def draw_curves(measure: Measure, path: Path) -> None:
    """Error by density, six methods at most."""
    from matplotlib.figure import Figure

    curves = {}
    for name in DRAWN:
        density, error = measure.draws(CURVES[name])
        if len(density):
            curves[NAMES[name]] = list(zip(density[:, 0].tolist(), error[:, 0].tolist(), strict=True))
    figure = Figure(figsize=(7.2, 4.8), dpi=110, layout="constrained")
    axes = plot_frontier(curves, figure.subplots(), error=AXES[measure.name], log=True)
    axes.set_xlim(0, 0.5)
    for which in (axes.yaxis.set_major_formatter, axes.yaxis.set_minor_formatter):
        which(lambda value, _: f"{value:g}")
    figure.savefig(path)


def draw_areas(found: Sequence[Measure], path: Path) -> None:
    """Bars of the areas under the curves with their intervals, one panel a measure."""
    from matplotlib.figure import Figure

    shown = [measure for measure in found if measure.name in AXES]
    figure = Figure(figsize=(4.6 * len(shown), 4.2), dpi=110, layout="constrained")
    for axes, measure in zip(np.atleast_1d(figure.subplots(1, len(shown))), shown, strict=True):
        areas = {NAMES[name]: compare.area(measure, settings) for name, settings in CURVES.items()}
        known = sorted(
            ((draws[0], name, draws) for name, draws in areas.items() if np.isfinite(draws[0])), key=lambda each: each[0]
        )
        for place, (value, _, draws) in enumerate(known):
            low, high = statistics.known_interval(draws[1:])
            reach = [[value - low], [high - value]] if np.isfinite(low) else None
            axes.barh(place, value, 0.7, xerr=reach, color="#c9cdd6", edgecolor=EDGE, linewidth=0.6, ecolor=EDGE, capsize=2)
        axes.set_yticks(range(len(known)), [name for _, name, _ in known], fontsize=8)
        axes.invert_yaxis()
        axes.set_xlabel(f"{measure.name}, mean over densities {compare.AREA[0]:g} to {compare.AREA[1]:g}", fontsize=9)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path)


def draw_all(found: Sequence[Measure], folder: Path = FOLDER) -> None:
    """Draw every picture that there are figures for, and print its path."""
    made = []
    for measure in found:
        if measure.name in AXES:
            made.append(f"fidelity-{measure.name.replace(' ', '-')}.png")
            draw_curves(measure, folder / made[-1])
    made.append("fidelity-areas.png")
    draw_areas(found, folder / made[-1])
    figures = heads.read()
    if "patterns coverage:gamma=0.9" in figures:
        made += heads.draw(figures, folder)
    for name in made:
        print(folder / name)


def linked(*names: str) -> list[str]:
    """Lines of Markdown that show those pictures that were drawn."""
    made = [f"![{PICTURES[name]}](results/{name})" for name in names if (FOLDER / name).exists()]
    return ["", *made] if made else []
