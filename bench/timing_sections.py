"""Sections of the report on time: targets, latency, break-even, growth, and the published code's figures."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

from bench import plots
from bench.markdown import Device, is_main, label, ms, share, table, times
from bench.plots import thousands
from bench.prompts import GAMMA, floor_of
from bench.rows import Row
from bench.targets import verdicts

# The published code (github.com/bytedance/FlexPrefill), run by us on one H200 with torch 2.11, on inputs of that run: not
# measured by this benchmark. By tokens: milliseconds, and those of cuDNN dense attention beside them.
PUBLISHED_DENSE_MS = {32768: 14.4, 131072: 251.0}
PUBLISHED_MS = {
    "mask": {32768: 9.0, 131072: 18.5},
    "whole call, gamma 0.9": {32768: 17.0, 131072: 119.0},
    "whole call, gamma 0.95": {32768: 20.8, 131072: 181.0},
    "block kernel, density .10": {32768: 3.59, 131072: 48.3},
    "block kernel, density .035": {32768: 1.66, 131072: 17.8},
}
_QUOTED = "published code, from another run"


def targets_section(device: Device) -> list[str]:
    words = {True: "met", False: "**missed**", None: "-"}
    rows = [(v.target, v.wanted, v.measured, words[v.met], v.note) for v in verdicts(device.parts)]
    said = "Input: the mixture at gamma 0.9; ratios to cuDNN dense attention of the same run, at 8k by CUDA graph replay."
    return ["### Targets", "", said, *table(("target", "wanted", "measured", "", "method"), rows)]


def latency_section(device: Device) -> list[str]:
    rows = [row for row in device.rows("latency", "long") if is_main(row)]
    if not rows:
        return []
    series: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        if "wall_ms" in row:
            series.setdefault(label(row), []).append((row["tokens"], row["wall_ms"]))
        if "graph_ms" in row and row["method"].startswith("call") and row["gamma"] == GAMMA:
            series.setdefault(label(row) + ", graph replay", []).append((row["tokens"], row["graph_ms"]))
    plots.lines(
        dict(sorted(series.items())) | quoted(device, ("mask", "whole call, gamma 0.9", "whole call, gamma 0.95")),
        device.picture("latency"),
        f"{device.name}, structured mixture; eager calls unless it says graph replay",
        "milliseconds",
    )
    every = sorted(
        device.rows("latency", "long"), key=lambda row: (row["tokens"], row["input"], row["named_density"], label(row))
    )
    body = [
        (
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
        for row in every
    ]
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
        "",
    )
    return ["### Latency", *device.shown("latency"), *table(head, body)]


def operations(row: Row) -> str:
    """TFLOP/s of what is attention alone: two products over the kept half of the scores; by graph replay where there is one."""
    milliseconds = row.get("graph_ms", row.get("wall_ms"))
    if milliseconds is None or "head_dim" not in row or not row["method"].startswith(("dense", "kernel")):
        return "-"
    density = 1.0 if row["method"].startswith("dense") else row["density"]
    return f"{2 * row['num_heads'] * row['head_dim'] * row['tokens'] ** 2 * density / milliseconds / 1e9:,.3g}"


def quoted(device: Device, names: Sequence[str]) -> dict[str, list[tuple[float, float]]]:
    """The published code's points, for plots of the device that they were measured on."""
    if "H200" not in device.name:
        return {}
    return {f"{_QUOTED}: {name}": [*PUBLISHED_MS[name].items()] for name in names}


def published_section() -> list[str]:
    rows = []
    for name, by_tokens in PUBLISHED_MS.items():
        for tokens, value in by_tokens.items():
            dense = PUBLISHED_DENSE_MS[tokens]
            rows.append((name, thousands(tokens), ms(value), ms(dense), f"{dense / value:.2f}x", f"{value / dense:.1%}"))
    said = (
        "github.com/bytedance/FlexPrefill, run by us on one NVIDIA H200 with torch 2.11 (bf16, batch 1, 32 heads, 8 KV heads, "
        "head_dim 128). These figures are quoted from that run, which had inputs of its own: compare them by their ratio to "
        "dense attention."
    )
    head = ("what", "tokens", "ms", "dense cuDNN of that run, ms", "dense / this", "this / dense")
    return ["## The published code, quoted", "", said, *table(head, rows)]


def growth_section(device: Device) -> list[str]:
    """Ratios to dense attention over length, and exponents of growth between lengths."""
    series: dict[str, list[tuple[float, float]]] = {}
    found: dict[str, dict[int, float]] = {}
    for row in device.rows("latency", "long"):
        if (
            is_main(row)
            and row["gamma"] in (None, GAMMA)
            and "wall_ms" in row
            and row["min_budget"] in (None, floor_of(row["tokens"]))
        ):
            found.setdefault(label(row), {})[row["tokens"]] = row["wall_ms"]
            if "ratio" in row:
                series.setdefault(label(row), []).append((row["tokens"], row["ratio"]))
    body = []
    for name, by_tokens in sorted(found.items()):
        lengths = sorted(by_tokens)
        steps = [
            f"{thousands(a)} to {thousands(b)}: {math.log(by_tokens[b] / by_tokens[a]) / math.log(b / a):.2f}"
            for a, b in pairwise(lengths)
        ]
        if steps:
            body.append((name, "; ".join(steps)))
    if not body:
        return []
    plots.lines(
        series, device.picture("growth"), f"{device.name}: dense attention's time / this, eager", "times as fast", level=1.0
    )
    said = "Exponents of eager time between lengths: 2 is quadratic. The density differs between lengths (see Inputs)."
    return ["### Growth", *device.shown("growth"), said, *table(("method", "exponents"), body)]


def break_even(points: Sequence[tuple[float, float]]) -> str:
    """The density at which the call takes as long as dense attention, from (density, dense / call); linear in time between."""
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
    rows = [row for row in device.rows("breakeven") if "ratio" in row]
    if not rows:
        return []
    lengths = sorted({row["tokens"] for row in rows})
    series: dict[str, list[tuple[float, float]]] = {}
    body = []
    for tokens in lengths:
        here = [row for row in rows if row["tokens"] == tokens]
        mixture = sorted((row["density"], row["ratio"]) for row in here if row["input"] == "mixture")
        replayed = [(row["density"], row["graph_ratio"]) for row in here if row["input"] == "mixture" and "graph_ratio" in row]
        if mixture:
            series[f"{thousands(tokens)} tokens"] = mixture
        captured = {row["input"]: row for row in here if row["input"] != "mixture"}
        body.append(
            (
                thousands(tokens),
                ", ".join(f"{ratio:.2f}x at {density:.2f}" for density, ratio in mixture) or "-",
                *(
                    f"{captured[name]['ratio']:.2f}x at {captured[name]['density']:.2f}" if name in captured else "-"
                    for name in ("retriever", "retriever, layers 1 and 2")
                ),
                break_even(mixture),
                break_even(replayed),
            )
        )
    lines = ["### Break-even"]
    if series:
        title = f"{device.name}: whole call at gamma 0.95 and the default floor, mixture"
        plots.curves(series, device.picture("break-even"), title, "density", "dense attention's time / the call's", 1.0)
        lines += device.shown("break-even")
    said = "Gamma 0.95, a floor of 1,024 tokens; dense attention's time over the whole call's, eager, at the measured density."
    head = (
        "tokens",
        "mixture",
        "retriever, all layers",
        "retriever, layers 1 and 2",
        "break-even density, eager",
        "by graph replay",
    )
    return [*lines, said, *table(head, body)]
