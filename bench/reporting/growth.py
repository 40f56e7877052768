"""Section "Growth": exponents of time between lengths."""

from __future__ import annotations

import math
from itertools import pairwise

from bench.reporting.device import Device, at_defaults, label, on_mixture
from bench.reporting.tables import markdown_table, thousands


def growth_section(device: Device) -> list[str]:
    """Return the section's lines."""
    found: dict[str, dict[int, float]] = {}
    for row in device.rows("latency", "long"):
        if on_mixture(row) and at_defaults(row) and "wall_ms" in row:
            found.setdefault(label(row), {})[row["tokens"]] = row["wall_ms"]
    body = []
    for name, by_tokens in sorted(found.items()):
        steps = [
            f"{thousands(a)} to {thousands(b)}: {math.log(by_tokens[b] / by_tokens[a]) / math.log(b / a):.2f}"
            for a, b in pairwise(sorted(by_tokens))
        ]
        if steps:
            body.append((name, "; ".join(steps)))
    if not body:
        return []
    notes = "Exponents of eager time between lengths; 2 is quadratic. The density differs between lengths (see Inputs)."
    return ["### Growth", "", notes, *markdown_table(("method", "exponents"), body)]
