"""Section "Stages": GPU kernel time by stage of the algorithm."""

from __future__ import annotations

from bench.measure.results import Row
from bench.reporting import plots
from bench.reporting.device import Device
from bench.reporting.tables import markdown_table, ms, share, thousands

# how the report calls a stage where the results have a shorter name
_TITLES = {"emission": "block lists", "glue": "other kernels"}


def stages_section(device: Device) -> list[str]:
    """Return the section's lines and draw its picture."""
    rows = [row for row in device.rows("stages") if "stages_ms" in row]
    if not rows:
        return []
    panels: dict[str, dict[str, dict[str, float]]] = {}
    for row in rows:
        panel = "mask alone" if row["method"] == "mask" else "whole call"
        panels.setdefault(panel, {})[f"{row['input']}, {thousands(row['tokens'])}"] = _titled(row["stages_ms"])
    plots.stacked(panels, device.picture("stages"), f"{device.name}: GPU kernel time by stage, gamma 0.9")
    titles = list(_titled(rows[0]["stages_ms"]))
    body = [
        (
            _name(row),
            share(row.get("density")),
            *(ms(value) for value in row["stages_ms"].values()),
            ms(row["kernel_ms"]),
            str(row["kernels"]),
            ms(row.get("graph_ms")),
            ms(row.get("wall_ms")),
        )
        for row in rows
    ]
    head = ("call", "density", *(f"{title}, ms" for title in titles), "all kernels, ms", "launches", "graph ms", "eager ms")
    others = []
    for row in rows:
        if row["glue_kernels_ms"]:
            heaviest = "; ".join(f"`{kernel[:60]}` {ms(value)}" for kernel, value in list(row["glue_kernels_ms"].items())[:4])
            others.append(f"- {_name(row)}: {heaviest}")
    notes = "Other kernels are those that torch runs between FlexPrefill's and attention. The heaviest of them, in ms:"
    return ["### Stages", *device.shown("stages"), *markdown_table(head, body), notes, "", *others, ""]


def _name(row: Row) -> str:
    return f"{row['method']}, {row['input']}, {thousands(row['tokens'])}"


def _titled(stages: dict[str, float]) -> dict[str, float]:
    return {_TITLES.get(stage, stage): value for stage, value in stages.items()}
