"""Methods against ours at equal density: errors side by side, and the areas under the curves."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from bench.fidelity import statistics
from bench.fidelity.curves import BEFORE, CURVES, NAMES, between, short, shown_name, signed
from bench.fidelity.measures import Measure
from bench.fidelity.results import Results
from bench.reporting.tables import markdown_table

# densities over which areas are taken: those that all but a fixed window are used at
AREA = (0.18, 0.3)
_POINTS = 21
# of needles that every method was asked
TASKS = {"16384/1": "one needle, 16k", "16384/64": "one of 64, 16k", "32768/1": "one needle, 32k"}


def at_equal_density(measure: Measure, setting: str, base: Sequence[str]) -> np.ndarray | None:
    """Error of a setting over that of the base's curve at its density (or less it), (1 + draws,); None if it was not measured."""
    if setting not in measure.figures:
        return None
    own_density, own_error = (each[0] for each in measure.draws([setting]))
    if setting.startswith(("hybrid:", "tuned ")):
        base = _as_then(measure, base)
    density, error = measure.draws([name for name in base if name != setting])
    expected = statistics.error_at(own_density, density, error, log=measure.ratio)
    return np.asarray(own_error / expected if measure.ratio else own_error - expected)


def _as_then(measure: Measure, base: Sequence[str]) -> list[str]:
    """Hybrid's settings by the rule that its options were measured with."""
    before = {name: name.replace("hybrid:", f"{BEFORE}:", 1) for name in base}
    return [before[name] if before[name] in measure.figures else name for name in base]


def cell(measure: Measure, draws: np.ndarray | None) -> str:
    """A factor or a difference with its interval; bold where the setting is better by more than that, "-" if not known."""
    if draws is None or not np.isfinite(draws[0]):
        return "-"
    low, high = statistics.known_interval(draws[1:])
    if measure.ratio:
        text = f"{draws[0]:.2f}x [{low:.2f}, {high:.2f}]" if np.isfinite(low) else f"{draws[0]:.2f}x"
        return f"**{text}**" if high < 1 else text
    text = f"{signed(draws[0])} {between(low, high, signed)}" if np.isfinite(low) else signed(draws[0])
    return f"**{text}**" if high < 0 else text


def found_needles(results: Results, setting: str) -> str:
    """Right answers of the three tasks together, and the mean density there."""
    tasks = {task: row for task, row in results.needles.get(setting, {}).items() if task in TASKS}
    if not tasks:
        return "-"
    right, n = sum(right for _, right, _ in tasks.values()), sum(n for *_, n in tasks.values())
    return f"{right} of {n} at {short(sum(density for density, *_ in tasks.values()) / len(tasks))}"


def equal_density_table(
    measures: Sequence[Measure], results: Results, settings: Iterable[str], base: Sequence[str] | Mapping[str, Sequence[str]]
) -> list[str]:
    """A row a setting, its errors against those of `base` (settings of one curve, or a curve by the setting's name)."""
    rows = []
    for setting in settings:
        curve = base[setting.partition(":")[0]] if isinstance(base, Mapping) else base
        found = [at_equal_density(measure, setting, curve) for measure in measures]
        if all(each is None for each in found):
            continue
        densities = [measure.draws([setting])[0] for measure in measures if setting in measure.figures]
        cells = [cell(measure, draws) for measure, draws in zip(measures, found, strict=True)]
        rows.append([shown_name(setting), short(float(densities[0][0, 0])), *cells, found_needles(results, setting)])
    return markdown_table(("method", "density", *(measure.name for measure in measures), "needles"), rows)


def area(measure: Measure, settings: Sequence[str]) -> np.ndarray:
    """Mean of the error over the densities of `AREA`, (1 + draws,); NaN where the settings do not reach both ends."""
    return np.asarray(np.mean([at_densities(measure, settings, at) for at in np.linspace(*AREA, _POINTS)], 0))


def at_densities(measure: Measure, settings: Sequence[str], density: float) -> np.ndarray:
    """Error of a curve at a density, (1 + draws,); NaN where the settings do not reach it from both sides."""
    densities, errors = measure.draws(settings)
    return statistics.error_at(np.full(densities.shape[1], density), densities, errors, log=measure.ratio)


def areas_table(measures: Sequence[Measure]) -> list[str]:
    """A row a method, the areas under its curves with intervals, by the first measure."""
    rows = []
    for name, settings in CURVES.items():
        cells, rank = [], np.inf
        for number, measure in enumerate(measures):
            found = area(measure, settings)
            if not np.isfinite(found[0]):
                cells.append("-")
                continue
            rank = min(rank, found[0]) if number == 0 else rank
            shown = short if measure.ratio else signed
            low, high = statistics.known_interval(found[1:])
            cells.append(f"{shown(found[0])} {between(low, high, shown) if np.isfinite(low) else ''}".strip())
        if any(text != "-" for text in cells):
            rows.append((rank, [NAMES[name], *cells]))
    ordered = [cells for _, cells in sorted(rows, key=lambda row: row[0])]
    return markdown_table(("method", *(measure.name for measure in measures)), ordered)
