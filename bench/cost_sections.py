"""Sections of the report on inputs, stages, memory and compile time, and on what failed."""

from __future__ import annotations

from bench import plots
from bench.calibration import landed
from bench.markdown import Device, label, ms, share, table
from bench.plots import thousands
from bench.rows import Row


def inputs_section(device: Device) -> list[str]:
    rows = []
    for row in sorted(device.rows("inputs"), key=lambda row: (row["input"], row["tokens"], row["named_density"])):
        met = "yes" if landed(row["density"], row["named_density"]) else "**no**"
        enough = "" if row["query_aware"] >= 0.25 else " (**under a quarter**)"
        aware = f"{row['query_aware']:.0%}{enough}"
        named = f"{row['named_density']:g}"
        rows.append((row["input"], thousands(row["tokens"]), named, share(row["density"]), met, aware, str(row["min_budget"])))
    head = ("input", "tokens", "named density", "measured, gamma 0.9", "within .02", "query-aware heads", "floor, tokens")
    return ["### Inputs", *table(head, rows)]


def stages_section(device: Device) -> list[str]:
    rows = [row for row in device.rows("stages") if "stages_ms" in row]
    if not rows:
        return []
    bars = {f"{row['method']}, {row['input']}, {thousands(row['tokens'])}": row["stages_ms"] for row in rows}
    plots.stacked(bars, device.picture("stages"), f"{device.name}: GPU kernel time by stage, gamma 0.9")
    names = list(rows[0]["stages_ms"])
    body = [
        (
            name,
            share(row.get("density")),
            *(ms(row["stages_ms"][stage]) for stage in names),
            ms(row["kernel_ms"]),
            str(row["kernels"]),
            ms(row.get("graph_ms")),
            ms(row.get("wall_ms")),
        )
        for name, row in zip(bars, rows, strict=True)
    ]
    head = ("call", "density", *(f"{name}, ms" for name in names), "kernels together, ms", "kernels", "graph ms", "eager ms")
    glue = []
    for name, row in zip(bars, rows, strict=True):
        if row["glue_kernels_ms"]:
            heaviest = "; ".join(f"`{kernel[:60]}` {ms(value)}" for kernel, value in list(row["glue_kernels_ms"].items())[:4])
            glue.append(f"- {name}: {heaviest}")
    said = "Glue is what the library runs besides its own kernels and attention. The heaviest of it, in ms:"
    return ["### Stages", *device.shown("stages"), *table(head, body), said, "", *glue, ""]


def memory_section(device: Device) -> list[str]:
    rows = [row for row in device.rows("memory") if "extra_mb" in row]
    if not rows:
        return []
    rows.sort(key=lambda row: (row["tokens"], row["method"]))
    series: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        if row["extra_mb"] > 0:
            series.setdefault(label(row), []).append((row["tokens"], row["extra_mb"]))
    if series:
        plots.lines(series, device.picture("memory"), f"{device.name}: memory beyond query, key, value and output", "MB")
    sizes = ("extra_mb", "peak_mb", "result_mb")
    body = [
        (thousands(row["tokens"]), label(row), share(row.get("density")), *(f"{row[size]:,.0f}" for size in sizes))
        for row in rows
    ]
    head = ("tokens", "method", "density", "extra MB", "peak beyond q, k, v, MB", "of it the result, MB")
    said = "Extra is the peak less the output; for a mask the peak, its lists and its map included."
    return ["### Memory", *(device.shown("memory") if series else []), said, *table(head, body)]


def compile_section(device: Device) -> list[str]:
    rows = [row for row in device.rows("compile") if "first_s" in row]
    if not rows:
        return []
    plots.lines(
        {row["method"]: list(zip(row["lengths"], row["first_s"], strict=True)) for row in rows},
        device.picture("compile"),
        f"{device.name}: seconds of the first call at each of {len(rows[0]['lengths'])} lengths, in mixed order",
        "seconds",
    )
    lines = ["### Compile time", *device.shown("compile")]
    body = [
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
    lines += table(("method", "lengths", "first calls, s", "the first three, s", "longest after them, s", "graphs"), body)
    steady = [
        (row["method"], f"{one['tokens']:,}", ms(one.get("any_length_ms")), ms(one.get("one_length_ms")), _relative(one))
        for row in rows
        for one in row["steady"]
    ]
    head = ("method", "tokens", "code for all lengths, ms", "code for this length, ms", "the first / the second")
    return [*lines, "Warm calls, eager:", *table(head, steady)]


def _relative(one: Row) -> str:
    both = (one.get("any_length_ms"), one.get("one_length_ms"))
    if not isinstance(both[0], float) or not isinstance(both[1], float):
        return str(one.get("one_length_error", "-"))[:80]
    return f"{both[0] / both[1]:.2f}"


def errors_section(device: Device) -> list[str]:
    found = []
    for part, rows in device.parts.items():
        for row in rows:
            for name in ("error", "graph_error"):
                if name in row:
                    found.append(f"- {part}, {row['input']}, {thousands(row['tokens'])}, {label(row)}: {name} `{row[name]}`")
    return ["### What failed", "", *found, ""] if found else []
