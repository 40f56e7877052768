"""Section "Latency": every method at every length, in two pictures and one table."""

from __future__ import annotations

from bench.measure.results import Row
from bench.reporting import plots
from bench.reporting.device import Device, at_defaults, label, method_lines, on_mixture
from bench.reporting.plots import Line
from bench.reporting.published import PUBLISHED_DENSE_MS, published_lines
from bench.reporting.tables import markdown_table, ms, share, thousands, times

_DENSE = ("dense cuDNN", "dense SDPA")
_CALLS = (*_DENSE, "call flash", "call triton", "call cpu", "mask")
_KERNELS = (
    *_DENSE,
    "dense FlashAttention-2",
    *(f"{method} {backend}" for method in ("dense flex", "kernel") for backend in ("flash", "triton", "cpu")),
)


def latency_section(device: Device) -> list[str]:
    """Return the section's lines and draw its pictures."""
    rows = [row for row in device.rows("latency", "long") if on_mixture(row)]
    if not rows:
        return []
    shown = [row for row in rows if at_defaults(row)]
    calls = [row for row in shown if row["method"] in _CALLS]
    timed = {row["tokens"] for row in shown if row["method"].startswith("kernel")}
    kernels = [row for row in shown if row["method"] in _KERNELS and row["tokens"] in timed]
    every = sorted(
        device.rows("latency", "long"), key=lambda row: (row["tokens"], row["input"], row["named_density"], label(row))
    )
    head = (
        "tokens",
        "input",
        "method",
        "density",
        "eager ms",
        "graph ms",
        "TFLOP/s",
        "dense / this, eager",
        "dense / this, graph",
    )
    notes = (
        "Every measurement. Ratios refer to cuDNN dense attention of the same run (SDPA on a CPU); above 1x is faster. TFLOP/s "
        "counts two matmuls over the kept half of the scores."
    )
    return [
        "### Latency",
        *_picture(device, "latency", calls, "The whole call and its mask", published=True),
        *_picture(device, "kernels", kernels, "Attention alone, over masks made beforehand"),
        notes,
        *markdown_table((*head, ""), [_cells(row) for row in every]),
    ]


def operations(row: Row) -> str:
    """Format the TFLOP/s of a row that is attention alone, from the graph time where there is one."""
    milliseconds = row.get("graph_ms", row.get("wall_ms"))
    if milliseconds is None or "head_dim" not in row or not row["method"].startswith(("dense", "kernel")):
        return "-"
    density = 1.0 if row["method"].startswith("dense") else row["density"]
    return f"{2 * row['num_heads'] * row['head_dim'] * row['tokens'] ** 2 * density / milliseconds / 1e9:,.3g}"


def _picture(device: Device, name: str, rows: list[Row], what: str, published: bool = False) -> list[str]:
    """Draw times and ratios; return the lines that show the picture, none without rows."""
    left, right = method_lines(rows, "wall_ms"), method_lines(rows, "ratio")
    if not right:
        return []
    if published and "H200" in device.name:
        quoted = published_lines()
        left |= quoted
        right |= {method: _to_dense(points) for method, points in quoted.items()}
    title = f"{device.name}: {what[0].lower()}{what[1:]}; structured mixture, eager calls"
    plots.over_lengths(left, right, device.picture(name), title, ("milliseconds", "times as fast as dense attention"))
    return ["", f"{what}, at gamma 0.9, eager:", *device.shown(name)]


def _to_dense(points: Line) -> Line:
    return [(tokens, PUBLISHED_DENSE_MS[int(tokens)] / value) for tokens, value in points]


def _cells(row: Row) -> tuple[str, ...]:
    return (
        thousands(row["tokens"]),
        f"{row['input']} {row['named_density']:g}",
        label(row),
        share(row.get("density")),
        ms(row.get("wall_ms")),
        ms(row.get("graph_ms")),
        operations(row),
        times(row.get("ratio")),
        times(row.get("graph_ratio")),
        str(row.get("error", row.get("graph_error", "")))[:80].replace("|", "/"),
    )
