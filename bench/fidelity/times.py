"""Methods at equal time: the cost of the mask and of the blocks that a method needs for an error, from `bench.selections`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from bench.fidelity import statistics
from bench.fidelity.compare import at_densities
from bench.fidelity.curves import CURVES, NAMES, short
from bench.fidelity.measures import Measure
from bench.reporting.tables import markdown_table, ms, thousands

PATH = Path(__file__).parents[1] / "results" / "selections-nvidia-h200.jsonl"
# masks of the table's methods, as bench.selections names them; the mask's time hardly depends on the setting
MASKS = {"hybrid": "hybrid 0.9", "coverage": "coverage 0.9", "published": "reference 0.9"}
SHARES = (0.2, 0.3, 0.5, 0.75)  # of dense attention's time


@dataclass
class Length:
    """Times at one length, in milliseconds of plain calls.

    Attributes
    ----------
    dense
        Dense attention.
    masks
        By name, as shares of dense attention's time in the same row: other runs differ.
    kernel
        (density, time) of the attention kernel alone, by rising density.
    calls
        Methods with their defaults: density, and times of dense attention, mask and call as CUDA graphs.
    """

    dense: float = 0.0
    masks: dict[str, float] = field(default_factory=dict)
    kernel: list[tuple[float, float]] = field(default_factory=list)
    calls: dict[str, tuple[float, float, float, float]] = field(default_factory=dict)

    def law(self) -> tuple[float, float]:
        """Time of the kernel as ``fixed + slope * density``, least squares of relative errors."""
        density, taken = np.array(self.kernel).T
        slope, fixed = np.polyfit(density, taken, 1, w=1 / taken)
        return float(fixed), float(slope)

    def mask(self, name: str) -> float:
        """A mask's time next to this `dense`; NaN if it was not timed."""
        return self.masks.get(name, np.nan) * self.dense

    def call(self, name: str, density: np.ndarray) -> np.ndarray:
        """Mask and kernel of a method that keeps so many blocks."""
        densities, taken = np.array(self.kernel).T
        kernel = np.interp(density, densities, taken, left=np.nan, right=np.nan)
        return np.asarray(self.mask(name) + kernel)

    def density_for(self, name: str, total: float) -> float:
        """Density with which the whole call takes `total`; NaN if the mask alone takes longer or nothing so slow was timed."""
        density, taken = np.array(self.kernel).T
        return float(np.interp(total - self.mask(name), taken, density, left=np.nan, right=np.nan))


def read(path: Path = PATH) -> dict[int, Length]:
    """Times by length."""
    found: dict[int, Length] = {}
    for row in map(json.loads, path.read_text(encoding="utf-8").splitlines()):
        length = found.setdefault(row["tokens"], Length())
        for name, times in row.get("times", {}).items():
            if "wall_ms" not in times:
                continue
            if name == "dense":
                length.dense = times["wall_ms"]
            elif name.startswith("mask "):
                length.masks[name.removeprefix("mask ")] = times["wall_ms"] / row["times"]["dense"]["wall_ms"]
        name = row.get("method", "")
        graphs = [row.get("times", {}).get(each, {}).get("graph_ms") for each in ("dense", f"mask {name}", f"call {name}")]
        if "density" in row and None not in graphs:
            length.calls[name] = (row["density"], *graphs)
        length.kernel += sorted((density, times["wall_ms"]) for density, times in row.get("kernel", []) if "wall_ms" in times)
    return {tokens: length for tokens, length in sorted(found.items()) if length.kernel and length.dense}


def laws(lengths: dict[int, Length]) -> list[str]:
    """The kernel's time by density, and a line through it."""
    rows: list[list[str]] = []
    for tokens, length in lengths.items():
        fixed, slope = length.law()
        worst = max(abs(fixed + slope * density - taken) / taken for density, taken in length.kernel)
        points = ", ".join(f"{short(density)}: {ms(taken)}" for density, taken in length.kernel)
        rows.append([thousands(tokens), ms(length.dense), points, f"{fixed:.2f} + {slope:.1f} density", f"{worst:.0%}"])
    return markdown_table(("tokens", "dense, ms", "density: kernel, ms", "line through them", "largest misfit"), rows)


def equal_time_table(measure: Measure, tokens: int, length: Length) -> list[str]:
    """Each method's error when mask and attention together take a share of dense attention's time."""
    rows = []
    for name, settings in CURVES.items():
        mask = MASKS.get(name, name)
        if mask not in length.masks or not any(setting in measure.figures for setting in settings):
            continue
        cells = []
        for share in SHARES:
            density = length.density_for(mask, share * length.dense)
            found = at_densities(measure, settings, density)
            cells.append(f"{short(found[0])} at {short(density)}" if np.isfinite(found[0]) else "-")
        rows.append([NAMES[name], f"{ms(length.mask(mask))} ({length.masks[mask]:.1%})", *cells])
    titles = (f"{share:.0%} of dense" for share in SHARES)
    return markdown_table((f"method, {thousands(tokens)}", "mask, ms (of dense)", *titles), rows)


def equal_error_table(measure: Measure, lengths: dict[int, Length], targets: Sequence[float]) -> list[str]:
    """Each method's call at the density that it needs for an error, and how many times faster than dense attention that is."""
    rows = []
    for name, settings in CURVES.items():
        density, error = measure.draws(settings)
        mask = MASKS.get(name, name)
        if not len(density) or not any(mask in length.masks for length in lengths.values()):
            continue
        cells = []
        for target in targets:
            needed = statistics.density_at(target, density, error)
            for length in lengths.values():
                call = length.call(mask, needed)
                cells.append(f"{ms(float(call[0]))} ({length.dense / call[0]:.1f}x)" if np.isfinite(call[0]) else "-")
        if set(cells) != {"-"}:
            rows.append([NAMES[name], *cells])
    titles = (f"{measure.name} {short(target)}, {thousands(tokens)}" for target in targets for tokens in lengths)
    return markdown_table(("method", *titles), rows)


def calls_table(tokens: int, length: Length) -> list[str]:
    """Whole calls of the gallery with their defaults, in milliseconds as CUDA graphs."""
    rows = []
    for name, (density, dense, mask, call) in sorted(length.calls.items(), key=lambda item: item[1][0]):
        rows.append([NAMES[name], short(density), f"{ms(mask)} ({mask / dense:.1%})", f"{ms(call)} ({dense / call:.1f}x)"])
    return markdown_table((f"defaults, {thousands(tokens)}", "density", "mask, ms (of dense)", "call, ms (faster)"), rows)


def lines(measure: Measure, path: Path = PATH) -> list[str]:
    """The report's part on time; none if the kernel was not timed."""
    lengths: dict[int, Any] = read(path) if path.exists() else {}
    if not lengths:
        return []
    opening = (
        "Masks and the kernel (backend Triton) at Llama-3.1-8B's shape on the report's mixture; errors are those on the texts."
    )
    made = [
        opening,
        *laws(lengths),
        f"{measure.name} at the density for which mask and kernel leave room in a share of dense's time:",
    ]
    for tokens, length in lengths.items():
        made += equal_time_table(measure, tokens, length)
    made += ["Mask and kernel at equal error, and how many times as fast as dense attention:"]
    made += equal_error_table(measure, lengths, (0.3, 0.25, 0.2))
    timed = [calls_table(tokens, length) for tokens, length in lengths.items() if length.calls]
    intro = "Whole calls with the methods' defaults, which say nothing about error, as CUDA graphs on the backend FLASH:"
    return [*made, *([intro] if timed else []), *(line for table in timed for line in table)]
