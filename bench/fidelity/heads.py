"""The report by layer and head: patterns, distances and densities as pictures, and the heads in which our selection loses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from bench.fidelity.curves import short, shown_name
from bench.fidelity.results import PATH, heads_path
from bench.reporting.tables import markdown_table

if TYPE_CHECKING:
    from matplotlib.axes import Axes

OURS = "attention hybrid:gamma=0.9"
# what the heads are compared with: of similar density on the texts
OTHERS = ("attention xattention:threshold=0.9", "attention flash_prefill:alpha=0.05", "attention coverage:gamma=0.9")
_WORST = 10


def read(path: Path = PATH) -> dict[str, dict[str, Any]]:
    """Figures by layer and head; none if they were not measured."""
    found = heads_path(path)
    return json.loads(found.read_text(encoding="utf-8")) if found.exists() else {}


def rows_of(figures: dict[str, Any]) -> list[dict[str, Any]]:
    """Figures of one selection as rows of a run, which `flexmask.plot` draws; a head's pattern is that of most texts."""
    rows = []
    for layer, densities in enumerate(figures["density"]):
        for head, density in enumerate(densities):
            row = {"layer": layer, "head": head, "density": density, "coverage": figures["coverage"][layer][head]}
            if "js_distance" in figures:
                query_aware = figures["is_query_aware"][layer][head] > 0.5
                row |= {
                    "distance": figures["js_distance"][layer][head],
                    "pattern": "query-aware" if query_aware else "vertical-slash",
                }
            rows.append(row)
    return rows


def draw(found: dict[str, dict[str, Any]], folder: Path) -> list[str]:
    """Draw the heat maps and the bars; the names of the files."""
    from matplotlib.figure import Figure

    from flexmask.plot import plot_density, plot_distances, plot_pattern_share

    coverage = rows_of(found["patterns coverage:gamma=0.9"])
    hybrid = rows_of(found["patterns hybrid:gamma=0.9"])
    names = []

    def save(name: str, size: tuple[float, float], *draws: Any) -> None:
        figure = Figure(figsize=size, dpi=90, layout="constrained")
        for axes, each in zip(np.atleast_1d(figure.subplots(1, len(draws))), draws, strict=True):
            each(axes)
        figure.savefig(folder / name)
        names.append(name)

    def densities(rows: list[dict[str, Any]], title: str) -> Any:
        def drawn(axes: Axes) -> None:
            plot_density(rows, axes).set_title(f"Density, {title}, gamma 0.9", fontsize=10)

        return drawn

    save("fidelity-distances.png", (5.6, 9.6), lambda axes: plot_distances(coverage, axes, tau=0.1))
    save("fidelity-densities.png", (10.6, 9.6), densities(coverage, "coverage"), densities(hybrid, "hybrid"))
    save("fidelity-patterns.png", (9.0, 3.2), lambda axes: plot_pattern_share(coverage, axes))
    return names


def worst_table(found: dict[str, dict[str, Any]]) -> list[str]:
    """Heads whose output errs most under hybrid selection, next to other methods in the same head."""
    methods = [name for name in (OURS, *OTHERS) if name in found]
    error = {name: np.array(found[name]["output_error_by_head"]) for name in methods}
    density = {name: np.array(found[name]["density_by_head"]) for name in methods}
    ours = error[OURS]
    rows = []
    for place in ours.ravel().argsort()[::-1][:_WORST]:
        layer, head = divmod(int(place), ours.shape[1])
        rows.append(
            [f"{layer}, {head}", *(f"{short(error[m][layer, head])} at {short(density[m][layer, head])}" for m in methods)]
        )
    titles = (shown_name(name.partition(" ")[2]) for name in methods)
    return markdown_table(("layer, head", *titles), rows)


def beaten(found: dict[str, dict[str, Any]]) -> list[str]:
    """In how many heads another method errs less with no more blocks."""
    lines = []
    ours, kept = (np.array(found[OURS][name]) for name in ("output_error_by_head", "density_by_head"))
    for name in (name for name in OTHERS if name in found):
        error, density = (np.array(found[name][each]) for each in ("output_error_by_head", "density_by_head"))
        better, worse = (error < ours) & (density <= kept), (error > ours) & (density >= kept)
        layers = ", ".join(str(layer) for layer in better.sum(1).argsort()[::-1][:3])
        where = f" (most of them in layers {layers})" if better.any() else ""
        fewer = f"errs less with no more blocks in {better.sum()} of {better.size} heads{where}"
        lines.append(f"- {shown_name(name.partition(' ')[2])} {fewer}, more with no fewer in {worse.sum()}.")
    return lines
