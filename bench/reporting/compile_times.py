"""Section "Compile time": first calls at many lengths, and code compiled for one length against code for all."""

from __future__ import annotations

from bench.measure.results import Row
from bench.reporting import plots
from bench.reporting.device import Device
from bench.reporting.tables import markdown_table, ms, times


def compile_section(device: Device) -> list[str]:
    """Return the section's lines and draw its picture."""
    rows = [row for row in device.rows("compile") if "first_s" in row]
    if not rows:
        return []
    lengths = rows[0]["lengths"]
    title = f"{device.name}: first call at each of {len(lengths)} lengths; numbers give the lengths (tokens) that compiled"
    plots.first_calls({row["method"]: row["first_s"] for row in rows}, lengths, device.picture("compile"), title)
    first = [
        (
            row["method"],
            str(len(row["lengths"])),
            f"{row['total_s']:.1f}",
            ", ".join(f"{x:.1f}" for x in row["first_s"][:3]),
            f"{max(row['first_s'][3:], default=0):.2f}",
            str(row["graphs"][-1]),
        )
        for row in rows
    ]
    first_head = ("method", "lengths", "all first calls, s", "first three, s", "longest after those, s", "graphs")
    steady = [
        (row["method"], f"{one['tokens']:,}", ms(one.get("any_length_ms")), ms(one.get("one_length_ms")), _relative(one))
        for row in rows
        for one in row["steady"]
    ]
    steady_head = ("method", "tokens", "code for all lengths, ms", "code for this length, ms", "all lengths / this length")
    return [
        "### Compile time",
        *device.shown("compile"),
        "The lengths come in mixed order, short and long ones alternating.",
        *markdown_table(first_head, first),
        "Warm calls, eager, with code compiled once for all lengths and with code compiled for one:",
        *markdown_table(steady_head, steady),
    ]


def _relative(one: Row) -> str:
    both = (one.get("any_length_ms"), one.get("one_length_ms"))
    if not isinstance(both[0], float) or not isinstance(both[1], float):
        return str(one.get("one_length_error", "-"))[:80]
    return times(both[0] / both[1])
