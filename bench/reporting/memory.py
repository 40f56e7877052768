"""Section "Memory": peak device memory of a call."""

from __future__ import annotations

from bench.measure.results import Row
from bench.reporting import plots
from bench.reporting.device import Device, label, method_lines
from bench.reporting.tables import markdown_table, share, thousands


def memory_section(device: Device) -> list[str]:
    """Return the section's lines and draw its picture."""
    rows = [row for row in device.rows("memory") if "extra_mb" in row]
    if not rows:
        return []
    rows.sort(key=lambda row: (row["tokens"], row["method"]))
    found = ["### Memory"]
    # dense attention holds a few bytes more than its output: nothing to draw on a logarithmic axis
    positive = [row for row in rows if row["extra_mb"] >= 1]
    if positive:
        title = f"{device.name}: device memory of a call, gamma 0.9"
        axes = ("MB beyond query, key, value and output", "peak relative to dense attention's")
        right = method_lines([row | {"relative": _relative(row, rows)} for row in rows], "relative")
        plots.over_lengths(method_lines(positive, "extra_mb"), right, device.picture("memory"), title, axes)
        found += device.shown("memory")
    sizes = ("extra_mb", "peak_mb", "result_mb")
    body = [
        (thousands(row["tokens"]), label(row), share(row.get("density")), *(f"{row[size]:,.0f}" for size in sizes))
        for row in rows
    ]
    head = ("tokens", "method", "density", "extra MB", "peak beyond q, k, v, MB", "result, MB")
    notes = "Extra is the peak without the output; for a mask it is the whole peak, including the block lists and the block map."
    return [*found, notes, *markdown_table(head, body)]


def _relative(row: Row, rows: list[Row]) -> float | None:
    """Peak of a call relative to that of dense attention, which holds nothing but its output."""
    dense = [other["peak_mb"] for other in rows if other["tokens"] == row["tokens"] and other["method"].startswith("dense")]
    return row["peak_mb"] / dense[0] if dense and dense[0] else None
