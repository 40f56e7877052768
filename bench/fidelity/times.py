"""Methods at equal time and at equal error: masks, kernels and whole calls that `bench.selections` timed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from bench.fidelity import statistics
from bench.fidelity.compare import at_densities
from bench.fidelity.curves import CURVES, NAMES, bounded, short
from bench.fidelity.measures import Measure
from bench.measure.rows import read_rows
from bench.reporting.tables import markdown_table, ms, thousands

PATH = Path(__file__).parents[1] / "results" / "selections-nvidia-h200.jsonl"
# masks of the table's methods, as bench.selections names them; the mask's time hardly depends on the setting
MASKS = {"hybrid": "hybrid 0.9", "coverage": "coverage 0.9", "published": "reference 0.9"}
SHARES = (0.2, 0.3, 0.5, 0.75)  # of dense attention's time
TARGETS = (0.3, 0.25, 0.2)
# tokens below which calls run dense by default, so that their times are not compared here
LEAST = 16384
KERNELS = {"flash": "FLASH", "triton": "Triton's kernel", "cpu": "CPU"}
SMALL = 64
# the settings of whole calls by selection, as bench.selections names it, and block size
WHOLE = {
    ("hybrid", 128): CURVES["hybrid"],
    ("hybrid", SMALL): [f"hybrid:gamma={gamma},block_size={SMALL}" for gamma in (0.8, 0.9, 0.95, 0.97)],
    ("coverage", 128): CURVES["coverage"],
    ("reference", 128): CURVES["published"],
}

Points = list[tuple[float, float]]
"""(density, time) by rising density"""


@dataclass
class Length:
    """Times at one length, in milliseconds of plain calls.

    Attributes
    ----------
    dense
        Dense attention: the median over the rows of this project's selections.
    masks
        By name, as shares of dense attention's time in the same row: other runs differ.
    kernels
        The attention kernel alone by backend and block size.
    calls
        Methods with their defaults: density, and times of dense attention, mask and call as CUDA graphs.
    whole
        Whole calls by selection, block size and backend, as shares of dense attention's time in the same row.
    memory
        MiB that masks of the gallery take while they are made, their results included.
    """

    dense: float = 0.0
    masks: dict[str, float] = field(default_factory=dict)
    kernels: dict[tuple[str, int], Points] = field(default_factory=dict)
    calls: dict[str, tuple[float, float, float, float]] = field(default_factory=dict)
    whole: dict[tuple[str, int, str], Points] = field(default_factory=dict)
    memory: dict[str, float] = field(default_factory=dict)

    @property
    def kernel(self) -> Points:
        """Triton's kernel over blocks of 128, which masks are added to: all methods were timed with it."""
        return self.kernels.get(("triton", 128), [])

    def law(self, backend: str = "triton", block_size: int = 128) -> tuple[float, float]:
        """Time of the kernel as ``fixed + slope * density``, least squares of relative errors."""
        density, taken = np.array(self.kernels[backend, block_size]).T
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

    def whole_call(self, key: tuple[str, int, str], density: np.ndarray) -> np.ndarray:
        """Whole calls that keep so many blocks, between neighbouring ones that were timed, as shares of dense attention.

        Infinite past the densest that was timed, -inf before the sparsest.
        """
        densities, shares = np.array(self.whole[key]).T
        return np.asarray(np.interp(density, densities, shares, left=-np.inf, right=np.inf))

    def density_for(self, name: str, total: float) -> float:
        """Density with which the whole call takes `total`; NaN if the mask alone takes longer or nothing so slow was timed."""
        density, taken = np.array(self.kernel).T
        return float(np.interp(total - self.mask(name), taken, density, left=np.nan, right=np.nan))


def read(path: Path = PATH) -> dict[int, Length]:
    """Times by length; of lengths without dense attention or Triton's kernel none."""
    found: dict[int, Length] = {}
    dense: dict[tuple[bool, int], list[float]] = {}
    for row in read_rows(path):
        length = found.setdefault(row["tokens"], Length())
        times = row.get("times", {})
        wall = {name: each["wall_ms"] for name, each in times.items() if "wall_ms" in each}
        if "dense" in wall:
            # those of the gallery may come from another run
            of_gallery = "method" in row
            dense.setdefault((of_gallery, row["tokens"]), []).append(wall["dense"])
            _add_shares(length, row, {name: taken / wall["dense"] for name, taken in wall.items()})
        name = row.get("method", "")
        graphs = [times.get(each, {}).get("graph_ms") for each in ("dense", f"mask {name}", f"call {name}")]
        if "density" in row and None not in graphs:
            length.calls[name] = (row["density"], *graphs)
        if "peak_mb" in row:
            length.memory[name] = row["peak_mb"]
        points = sorted((density, each["wall_ms"]) for density, each in row.get("kernel", []) if "wall_ms" in each)
        if points:
            length.kernels[row.get("backend", "triton"), row.get("block_size", 128)] = points
    for (_, tokens), taken in sorted(dense.items(), reverse=True):
        found[tokens].dense = float(np.median(taken))
    return {tokens: length for tokens, length in sorted(found.items()) if length.kernel and length.dense}


def _add_shares(length: Length, row: Mapping[str, Any], shares: Mapping[str, float]) -> None:
    """Take over a row's masks and whole calls, as shares of its dense attention."""
    for name, share in shares.items():
        if name.startswith("mask "):
            length.masks[name.removeprefix("mask ")] = share
    by_key: dict[tuple[str, int, str], Points] = {}
    for name, call in row.get("calls", {}).items():
        if name in shares:
            key = call["selection"], call["block_size"], row["backend"]
            by_key.setdefault(key, []).append((call["density"], shares[name]))
    length.whole |= {key: sorted(points) for key, points in by_key.items()}


def laws(lengths: dict[int, Length]) -> list[str]:
    """The kernels' time by density, and a line through it."""
    rows: list[list[str]] = []
    for tokens, length in lengths.items():
        for (backend, size), timed in sorted(length.kernels.items(), key=lambda item: (item[0][0] != "triton", -item[0][1])):
            fixed, slope = length.law(backend, size)
            worst = max(abs(fixed + slope * density - taken) / taken for density, taken in timed)
            points = ", ".join(f"{short(density)}: {ms(taken)}" for density, taken in timed)
            name = f"{thousands(tokens)}, {KERNELS[backend]}, blocks of {size}"
            rows.append([name, ms(length.dense), points, f"{fixed:.2f} + {slope:.1f} density", f"{worst:.0%}"])
    return markdown_table(("tokens, kernel", "dense, ms", "density: kernel, ms", "line through them", "largest misfit"), rows)


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


def whole_calls_table(measure: Measure, lengths: dict[int, Length], targets: Sequence[float] = TARGETS) -> list[str]:
    """Whole calls at the density that a selection needs for an error, between calls that were timed at neighbouring densities."""
    rows = []
    keys = {key for length in lengths.values() for key in length.whole if key[:2] in WHOLE}
    for key in sorted(keys, key=lambda key: (list(WHOLE).index(key[:2]), key[2])):
        density, error = measure.draws(WHOLE[key[:2]])
        cells = []
        for target, length in ((target, length) for target in targets for length in lengths.values()):
            if not len(density) or key not in length.whole:
                cells.append("-")
                continue
            share = length.whole_call(key, statistics.density_at(target, density, error))
            # an end past what was timed is not known
            low, high = (1 / end if np.isfinite(end) else np.inf for end in reversed(statistics.interval(share[1:])))
            factor = f"{1 / share[0]:.1f}x {bounded(low, high, '.1f')}"
            cells.append(f"{ms(float(share[0] * length.dense))}: {factor}" if np.isfinite(share[0]) else "-")
        if set(cells) != {"-"}:
            selection, size, backend = key
            name = NAMES.get(selection, "published") + (f", blocks of {size}" if size != 128 else "")
            rows.append([f"{name}, {KERNELS[backend]}", *cells])
    titles = (f"{measure.name} {short(target)}, {thousands(tokens)}" for target in targets for tokens in lengths)
    return markdown_table(("whole call", *titles), rows) if rows else []


def calls_table(tokens: int, length: Length) -> list[str]:
    """Whole calls of the gallery with their defaults, in milliseconds as CUDA graphs."""
    rows = []
    for name, (density, dense, mask, call) in sorted(length.calls.items(), key=lambda item: item[1][0]):
        rows.append([NAMES[name], short(density), f"{ms(mask)} ({mask / dense:.1%})", f"{ms(call)} ({dense / call:.1f}x)"])
    return markdown_table((f"defaults, {thousands(tokens)}", "density", "mask, ms (of dense)", "call, ms (faster)"), rows)


def memory(lengths: dict[int, Length]) -> list[str]:
    """A sentence a length on the memory that the gallery's masks take."""
    made = []
    for tokens, length in lengths.items():
        taken = sorted(length.memory.items(), key=lambda item: item[1])
        if taken:
            named = ", ".join(f"{NAMES.get(name, name)} {mib:,.0f}" for name, mib in taken)
            made.append(f"MiB that masks of 32 heads take at {thousands(tokens)} while they are made: {named}.")
    return made


def lines(measure: Measure, path: Path = PATH) -> list[str]:
    """The report's part on time; none if the kernel was not timed."""
    lengths = {tokens: length for tokens, length in read(path).items() if tokens >= LEAST} if path.exists() else {}
    if not lengths:
        return []
    opening = (
        "Masks and kernels at Llama-3.1-8B's shape on the report's mixture; errors are those on the texts. Masks are added to "
        "Triton's kernel over blocks of 128."
    )
    made = [opening, *laws(lengths)]
    whole = whole_calls_table(measure, lengths)
    if whole:
        made += [f"Whole calls at equal {measure.name}, in ms, and how many times as fast as dense attention in turns:", *whole]
    made += [f"{measure.name} at the density for which mask and kernel leave room in a share of dense's time:"]
    for tokens, length in lengths.items():
        made += equal_time_table(measure, tokens, length)
    made += ["From parts, for the gallery too: mask and kernel at equal error, and how many times as fast as dense attention:"]
    made += equal_error_table(measure, lengths, TARGETS)
    made += memory(lengths)
    timed = [calls_table(tokens, length) for tokens, length in lengths.items() if length.calls]
    intro = "Whole calls with the methods' defaults, which say nothing about error, as CUDA graphs on the backend FLASH:"
    return [*made, *([intro] if timed else []), *(line for table in timed for line in table)]
