"""The report's sections, one per part: lines of markdown from a device's rows, and the plots beside them."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from bench import plots
from bench.calibration import landed
from bench.plots import thousands
from bench.prompts import GAMMA, floor_of, named_density
from bench.rows import Row, slug
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

Parts = dict[str, list[Row]]


class Device:
    """One device's rows, and where its plots go."""

    def __init__(self, name: str, parts: Parts, folder: Path, out: Path) -> None:
        self.name, self.parts, self.folder, self.out = name, parts, folder, out

    def rows(self, *parts: str) -> list[Row]:
        """All rows of some parts."""
        return [row for part in parts for row in self.parts.get(part, [])]

    def picture(self, name: str) -> Path:
        """The file of a plot."""
        return self.folder / f"{slug(self.name)}-{name}.png"

    def shown(self, name: str) -> list[str]:
        """The lines that show a plot."""
        path = self.picture(name).resolve()
        return ["", f"![{name}, {self.name}]({Path(os.path.relpath(path, self.out.resolve().parent)).as_posix()})", ""]


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """A table in markdown."""
    return ["", f"| {' | '.join(head)} |", "|" + "---|" * len(head), *(f"| {' | '.join(row)} |" for row in rows), ""]


def ms(value: object) -> str:
    """Milliseconds with three digits, or a dash."""
    return (
        f"{value:,.3g}"
        if isinstance(value, (int, float)) and value < 1000
        else f"{value:,.0f}"
        if isinstance(value, float)
        else "-"
    )


def times(value: object) -> str:
    """A ratio, or a dash."""
    return f"{value:.2f}x" if isinstance(value, float) else "-"


def share(value: object) -> str:
    """A density, or a dash."""
    return f"{value:.3f}" if isinstance(value, (int, float)) else "-"


def label(row: Row) -> str:
    """A method with its gamma and, where it is not that of its length, its floor."""
    words = [f"FlexPrefill {row['method'][5:]}" if row["method"].startswith("call ") else row["method"]]
    if row["gamma"] is not None:
        words.append(f"gamma {row['gamma']:g}")
    if row["min_budget"] not in (None, floor_of(row["tokens"])):
        words.append(f"floor {row['min_budget']}")
    return ", ".join(words)


def is_main(row: Row) -> bool:
    """Whether the row is of the mixture at the density that targets are stated at."""
    return bool(row["input"] == "mixture" and row["named_density"] == named_density(row["tokens"]))


def targets_section(device: Device) -> list[str]:
    words = {True: "met", False: "**missed**", None: "-"}
    rows = [(v.target, v.wanted, v.measured, words[v.met], v.note) for v in verdicts(device.parts)]
    said = "Input: the mixture at gamma 0.9; ratios to cuDNN dense attention of the same run, at 8k by CUDA graph replay."
    return ["### Targets", "", said, *table(("target", "wanted", "measured", "", "method"), rows)]


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
            times(row.get("ratio")),
            times(row.get("graph_ratio")),
            str(row.get("error", row.get("graph_error", "")))[:80].replace("|", "/"),
        )
        for row in every
    ]
    head = ("tokens", "input", "method", "density", "eager ms", "graph ms", "dense / this, eager", "dense / this, graph", "")
    return ["### Latency", *device.shown("latency"), *table(head, body)]


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


def errors_section(device: Device) -> list[str]:
    found = []
    for part, rows in device.parts.items():
        for row in rows:
            for name in ("error", "graph_error"):
                if name in row:
                    found.append(f"- {part}, {row['input']}, {thousands(row['tokens'])}, {label(row)}: {name} `{row[name]}`")
    return ["### What failed", "", *found, ""] if found else []


SECTIONS = (
    targets_section,
    latency_section,
    break_even_section,
    stages_section,
    memory_section,
    compile_section,
    growth_section,
    inputs_section,
    errors_section,
)
