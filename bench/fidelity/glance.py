"""The report's first tables: density at equal error on texts, blocks that find every needle, errors of heads at equal density."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from bench.fidelity import statistics
from bench.fidelity.compare import TASKS, at_densities, found_needles
from bench.fidelity.curves import CURVES, NAMES, between, bounded, short, signed
from bench.fidelity.measures import Measure
from bench.fidelity.results import Results
from bench.reporting.tables import markdown_table

DENSITIES = (0.15, 0.2, 0.3)
# by the measure's name, the errors that methods are compared at
TARGETS = {"abs d": (0.3, 0.2), "change of loss": (0.08, 0.03)}


def by_density(row: tuple[float, list[str]]) -> float:
    """Order of a table's rows: the best first, those that do not reach the error last."""
    return row[0] if np.isfinite(row[0]) else np.inf


def equal_error(found: Sequence[Measure]) -> list[str]:
    """Density that each method needs for an error on texts, as a multiple of hybrid's too."""
    head: list[str] = []
    columns: list[dict[str, np.ndarray]] = []
    for measure in found:
        for target in TARGETS.get(measure.name, ()):
            head.append(f"{measure.name} {short(target) if measure.ratio else signed(target)}")
            drawn = {name: measure.draws(settings) for name, settings in CURVES.items()}
            columns.append({name: statistics.density_at(target, *draws) for name, draws in drawn.items() if len(draws[0])})
    rows = []
    for name in CURVES:
        cells = []
        for column in columns:
            needed, base = column.get(name), column["hybrid"]
            if needed is None or not np.isfinite(needed[0]):
                cells.append("-")
            elif name == "hybrid":
                cells.append(f"{short(needed[0])} {bounded(*statistics.interval(needed[1:]))}")
            else:
                factor = bounded(*statistics.ratio(needed[1:], base[1:]), digits=".2f")
                cells.append(f"{short(needed[0])}: {needed[0] / base[0]:.2f}x {factor}")
        if set(cells) != {"-"}:
            first = columns[1].get(name, np.array([np.inf]))
            rows.append((float(first[0]), [NAMES[name], *cells]))
    return markdown_table(("method", *head), [cells for _, cells in sorted(rows, key=by_density)])


def needles(results: Results) -> list[str]:
    """The fewest blocks with which each method finds every needle, and what it finds with the fewest that were measured."""
    rows = []
    for name, settings in CURVES.items():
        drawn = []
        for setting in settings:
            tasks = results.needles.get(setting, {})
            if all(task in tasks for task in TASKS):
                each = [tasks[task] for task in TASKS]
                density = sum(row[0] for row in each) / len(each)
                drawn.append((density, all(right == n for _, right, n in each), setting))
        if not drawn:
            continue
        fewest = min((density for density, found_all, _ in drawn if found_all), default=np.inf)
        lowest, highest = (found_needles(results, each[2]) for each in (min(drawn), max(drawn)))
        every = short(fewest) if np.isfinite(fewest) else "none"
        rows.append((fewest, [NAMES[name], every, lowest, highest]))
    head = ("method", "fewest blocks that find all", "with the fewest measured", "with the most measured")
    return markdown_table(head, [cells for _, cells in sorted(rows, key=by_density)])


def heads(found: Sequence[Measure]) -> list[str]:
    """Errors of heads' outputs, and the attention that they lose, at equal density."""
    chosen = [measure for measure in found if measure.name in ("output error", "attention lost")]
    rows = []
    for name, settings in CURVES.items():
        cells, rank = [], np.inf
        for measure in chosen:
            for density in DENSITIES:
                draws = at_densities(measure, settings, density)
                if not np.isfinite(draws[0]):
                    cells.append("-")
                    continue
                low, high = statistics.known_interval(draws[1:])
                cells.append(f"{short(draws[0])} {between(low, high) if np.isfinite(low) else ''}".strip())
                rank = min(rank, draws[0]) if measure is chosen[0] and density == DENSITIES[1] else rank
        if any(cell != "-" for cell in cells):
            rows.append((float(rank), [NAMES[name], *cells]))
    head = [f"{measure.name} at {short(density)}" for measure in chosen for density in DENSITIES]
    return markdown_table(("method", *head), [cells for _, cells in sorted(rows, key=by_density)]) if chosen else []
