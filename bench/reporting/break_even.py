"""Section "Break-even": the density at which the whole call takes as long as dense attention."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from bench.measure.results import Row
from bench.reporting import plots
from bench.reporting.device import Device
from bench.reporting.plots import MOST_LINES, Line
from bench.reporting.tables import markdown_table, thousands

_CAPTURED = ("retriever", "retriever, layers 1 and 2")


def break_even(points: Sequence[tuple[float, float]]) -> str:
    """Find the break-even density from points (density, dense / call), interpolating time linearly."""
    ordered = sorted((density, 1 / ratio) for density, ratio in points)
    if not ordered:
        return "-"
    if ordered[0][1] >= 1:
        return f"below {ordered[0][0]:.2f}"
    for (low, fast), (high, slow) in pairwise(ordered):
        if fast < 1 <= slow:
            return f"{low + (high - low) * (1 - fast) / (slow - fast):.2f}"
    return f"above {ordered[-1][0]:.2f}"


def break_even_section(device: Device) -> list[str]:
    """Return the section's lines and draw its picture."""
    rows = [row for row in device.rows("breakeven") if "ratio" in row]
    if not rows:
        return []
    lines: dict[int, Line] = {}
    body = []
    for tokens in sorted({row["tokens"] for row in rows}):
        here = [row for row in rows if row["tokens"] == tokens]
        mixture = sorted((row["density"], row["ratio"]) for row in here if row["input"] == "mixture")
        replayed = [(row["density"], row["graph_ratio"]) for row in here if row["input"] == "mixture" and "graph_ratio" in row]
        if mixture:
            lines[tokens] = mixture
        said = ", ".join(f"{ratio:.2f}x at {density:.2f}" for density, ratio in mixture) or "-"
        body.append((thousands(tokens), said, *_captured(here), break_even(mixture), break_even(replayed)))
    found = ["### Break-even"]
    if lines:
        title = f"{device.name}: whole call, gamma 0.95, floor of 1,024 tokens, mixture, eager"
        shown = {f"{thousands(tokens)} tokens": lines[tokens] for tokens in _few(lines)}
        plots.over_density(shown, device.picture("break-even"), title, "times as fast as dense attention")
        found += device.shown("break-even")
    notes = (
        "Speed of the whole call relative to dense attention, eager, at gamma 0.95 and a floor of 1,024 tokens, each at its "
        "measured density. The last two columns give the density at which both take the same time on the mixture."
    )
    head = (
        "tokens",
        "mixture",
        "retriever, all layers",
        "retriever, layers 1 and 2",
        "break-even density, eager",
        "by graph replay",
    )
    return [*found, notes, *markdown_table(head, body)]


def _captured(rows: Sequence[Row]) -> list[str]:
    by_input = {row["input"]: f"{row['ratio']:.2f}x at {row['density']:.2f}" for row in rows if row["input"] in _CAPTURED}
    return [by_input.get(name, "-") for name in _CAPTURED]


def _few(lengths: Sequence[int] | dict[int, Line]) -> list[int]:
    """Pick the lengths to draw: powers of two where all would be too many, and the longest of those."""
    ordered = sorted(lengths)
    if len(ordered) > MOST_LINES:
        ordered = [tokens for tokens in ordered if tokens & (tokens - 1) == 0][-MOST_LINES:]
    return ordered
