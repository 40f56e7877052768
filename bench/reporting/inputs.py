"""Sections "Inputs" and "What failed": the densities that calibration met, and the errors in rows."""

from __future__ import annotations

from bench.prompts.calibration import landed
from bench.reporting.device import Device, label
from bench.reporting.tables import markdown_table, share, thousands


def inputs_section(device: Device) -> list[str]:
    """Return the section's lines."""
    rows = []
    for row in sorted(device.rows("inputs"), key=lambda row: (row["input"], row["tokens"], row["named_density"])):
        met = "yes" if landed(row["density"], row["named_density"]) else "**no**"
        enough = "" if row["query_aware"] >= 0.25 else " (**under a quarter**)"
        aware = f"{row['query_aware']:.0%}{enough}"
        named = f"{row['named_density']:g}"
        rows.append((row["input"], thousands(row["tokens"]), named, share(row["density"]), met, aware, str(row["min_budget"])))
    head = ("input", "tokens", "named density", "measured, gamma 0.9", "within .02", "query-aware heads", "floor, tokens")
    return ["### Inputs", *markdown_table(head, rows)]


def errors_section(device: Device) -> list[str]:
    """Return the section's lines; none without errors."""
    found = []
    for part, rows in device.parts.items():
        for row in rows:
            for name in ("error", "graph_error"):
                if name in row:
                    found.append(f"- {part}, {row['input']}, {thousands(row['tokens'])}, {label(row)}: {name} `{row[name]}`")
    return ["### What failed", "", *found, ""] if found else []
