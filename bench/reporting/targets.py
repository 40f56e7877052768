"""Section "Targets": what the project aims at, as ratios to cuDNN dense attention of the same run, met or missed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bench.measure.results import Row
from bench.prompts.calibration import landed
from bench.prompts.prompt import GAMMA, floor_of, named_density
from bench.reporting.device import Device
from bench.reporting.tables import markdown_table, thousands

# by tokens: upper bounds of mask time / dense time, lower bounds of dense time / call time, upper bounds of MB beyond query, key,
# value and output
MASK_SHARE = {8192: 0.15, 32768: 0.03, 131072: 0.007, 524288: 0.003}
CALL_RATIO = {8192: 1.5, 32768: 3.5, 131072: 5.5, 524288: 8.0}
EXTRA_MB = {8192: 64.0, 32768: 192.0, 131072: 700.0, 524288: 3 * 1024.0}
# at this density and length the attention kernel is to reach cuDNN's operations per second
KERNEL_DENSITY, KERNEL_TOKENS = 0.1, 131072
# up to here calls are launch-bound, so that the targets refer to CUDA graph replay
GRAPH_UP_TO = 8192


@dataclass(frozen=True)
class Verdict:
    """One line of the table; `met` is None if nothing was measured."""

    target: str
    wanted: str
    measured: str
    met: bool | None
    note: str = ""


def targets_section(device: Device) -> list[str]:
    """Return the section's lines; missed targets are in bold."""
    words = {True: "met", False: "**missed**", None: "-"}
    rows = [(v.target, v.wanted, v.measured, words[v.met], v.note) for v in verdicts(device.parts)]
    notes = (
        "Measured on the mixture at gamma 0.9, relative to cuDNN dense attention of the same run; by CUDA graph replay at 8k "
        "tokens, where eager calls are launch-bound, and by eager calls elsewhere."
    )
    return ["### Targets", "", notes, *markdown_table(("target", "wanted", "measured", "", "how"), rows)]


def mixture_row(rows: Sequence[Row], method: str, tokens: int, gamma: float = GAMMA, density: float | None = None) -> Row | None:
    """Find the row of a method on the mixture at its named density and floor."""
    for row in rows:
        if (row["input"], row["tokens"], row["method"], row["gamma"]) != ("mixture", tokens, method, gamma):
            continue
        if row["min_budget"] == floor_of(tokens) and row["named_density"] == (density or named_density(tokens)):
            return row
    return None


def verdicts(parts: dict[str, list[Row]]) -> list[Verdict]:
    """Compare every target with the rows."""
    timed = [*parts.get("latency", []), *parts.get("long", [])]
    found = []
    for tokens, share in MASK_SHARE.items():
        found.append(_mask(mixture_row(timed, "mask", tokens), tokens, share))
    for tokens, ratio in CALL_RATIO.items():
        row = _first(timed, tokens)
        value, clock = _ratio(row, tokens)
        name = f"dense / whole call, {thousands(tokens)}, density {named_density(tokens)}"
        found.append(
            _verdict(name, f">= {ratio:g}x", value, lambda x: f"{x:.2f}x", value is not None and value >= ratio, row, clock)
        )
    for tokens, limit in EXTRA_MB.items():
        row = _first(parts.get("memory", []), tokens)
        value = None if row is None else row.get("extra_mb")
        name = f"memory beyond q, k, v and output, {thousands(tokens)}"
        met = value is not None and value <= limit
        found.append(_verdict(name, f"<= {limit:,.0f} MB", value, lambda x: f"{x:,.0f} MB", met, row, ""))
    found.append(_kernel(timed))
    return found


def _first(rows: Sequence[Row], tokens: int) -> Row | None:
    """Find the whole call with the backend that "auto" chooses."""
    for backend in ("flash", "triton", "cpu"):
        row = mixture_row(rows, f"call {backend}", tokens)
        if row is not None and "error" not in row:
            return row
    return None


def _ratio(row: Row | None, tokens: int) -> tuple[float | None, str]:
    """Return the speed relative to dense attention, and which clock measured it."""
    if row is None:
        return None, ""
    if tokens <= GRAPH_UP_TO:
        return row.get("graph_ratio"), "graph replay"
    return row.get("ratio"), "eager calls"


def _mask(row: Row | None, tokens: int, share: float) -> Verdict:
    ratio, clock = _ratio(row, tokens)
    value = None if ratio is None else 1 / ratio
    met = value is not None and value <= share
    return _verdict(f"mask / dense, {thousands(tokens)}", f"<= {share:.1%}", value, lambda x: f"{x:.2%}", met, row, clock)


def _kernel(rows: Sequence[Row]) -> Verdict:
    name = f"kernel at density {KERNEL_DENSITY}, {thousands(KERNEL_TOKENS)}: TFLOP/s relative to cuDNN"
    for backend in ("flash", "triton"):
        row = mixture_row(rows, f"kernel {backend}", KERNEL_TOKENS, density=KERNEL_DENSITY)
        if row is not None and "ratio" in row:
            value = row["ratio"] * row["density"]
            return _verdict(name, ">= 100%", value, lambda x: f"{x:.1%}", value >= 1, row, "eager calls")
    return _verdict(name, ">= 100%", None, str, False, None, "")


def _verdict(
    name: str,
    wanted: str,
    value: float | None,
    shown: Callable[[float], str],
    met: bool,
    row: Row | None,
    clock: str,
) -> Verdict:
    if row is None or value is None:
        reason = "" if row is None else str(row.get("error", row.get("graph_error", "")))
        return Verdict(name, wanted, "not measured", None, reason)
    said = [row["method"], clock]
    if "density" in row:
        off = "" if landed(row["density"], row["named_density"]) else f" instead of {row['named_density']}"
        said.append(f"density {row['density']:.3f}{off}, floor {row['min_budget']} tokens")
    return Verdict(name, wanted, shown(value), met, "; ".join(filter(None, said)))
