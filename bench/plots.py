"""The report's plots; needs matplotlib, no GPU."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot
from matplotlib.axes import Axes

Points = Sequence[tuple[float, float]]

_SIZE = (8.0, 5.5)
_MOST_TICKS = 12


def thousands(tokens: float) -> str:
    """A length in words: ``128k``, ``1M``."""
    if tokens < 1024 or tokens % 1024:
        return f"{tokens:,.0f}"
    return f"{tokens / 2**20:g}M" if tokens >= 2**20 else f"{tokens / 1024:g}k"


def _token_axis(axes: Axes, points: Sequence[float]) -> None:
    ticks = sorted({*points})
    if len(ticks) > _MOST_TICKS:
        ticks = [2.0**power for power in range(math.floor(math.log2(ticks[0])), math.ceil(math.log2(ticks[-1])) + 1)]
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [thousands(tick) for tick in ticks])
    axes.minorticks_off()
    axes.set_xlabel("tokens")
    axes.grid(alpha=0.3)


def _style(name: str) -> dict[str, Any]:
    """Dense methods grey and dashed, figures from elsewhere as lone crosses, the rest in colours."""
    if name.startswith("published"):
        return {"linestyle": "none", "marker": "x", "markersize": 8}
    if name.startswith("dense"):
        return {"linestyle": "--", "marker": "s", "markersize": 3}
    return {"linestyle": "-", "marker": "o", "markersize": 4}


def lines(
    series: Mapping[str, Points], path: Path, title: str, unit: str, *, log: bool = True, level: float | None = None
) -> None:
    """Lines over lengths, one per method; `level` draws a horizontal line."""
    figure, axes = pyplot.subplots(figsize=_SIZE, layout="constrained")
    colours = iter([*pyplot.get_cmap("tab20").colors] * 3)  # type: ignore[attr-defined]  # only listed colour maps have it
    for name, points in series.items():
        ordered = sorted(points)
        axes.plot([x for x, _ in ordered], [y for _, y in ordered], label=name, color=next(colours), **_style(name))
    _token_axis(axes, [x for points in series.values() for x, _ in points])
    axes.set_yscale("log")
    if level is not None:
        axes.axhline(level, color="black", linewidth=0.8)
    axes.set_ylabel(unit)
    axes.set_title(title, fontsize=10)
    figure.legend(fontsize=7, ncols=3, loc="outside lower center")
    _save(path)


def curves(series: Mapping[str, Points], path: Path, title: str, x_label: str, y_label: str, level: float) -> None:
    """Lines over a share between 0 and 1, with a horizontal line at `level`."""
    _figure, axes = pyplot.subplots(figsize=_SIZE, layout="constrained")
    for name, points in series.items():
        ordered = sorted(points)
        axes.plot([x for x, _ in ordered], [y for _, y in ordered], label=name, marker="o", markersize=4)
    axes.axhline(level, color="black", linewidth=0.8)
    axes.set_yscale("log")
    axes.set(xlabel=x_label, ylabel=y_label, xlim=(0, 1))
    axes.set_title(title, fontsize=10)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=7)
    _save(path)


def stacked(bars: Mapping[str, Mapping[str, float]], path: Path, title: str) -> None:
    """Shares of a whole, one bar per name; parts in the order of the first bar, the whole in milliseconds beside it."""
    figure, axes = pyplot.subplots(figsize=(_SIZE[0], 1.4 + 0.45 * len(bars)), layout="constrained")
    names = list(bars)
    left = [0.0] * len(names)
    totals = [sum(bars[name].values()) or 1.0 for name in names]
    for part in next(iter(bars.values())):
        widths = [bars[name][part] / total for name, total in zip(names, totals, strict=True)]
        axes.barh(names, widths, left=left, label=part)
        left = [begin + width for begin, width in zip(left, widths, strict=True)]
    for row, total in enumerate(totals):
        axes.text(1.01, row, f"{total:.3g} ms", va="center", fontsize=7)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.1)
    axes.set_xlabel("share of kernel time")
    axes.tick_params(axis="y", labelsize=7)
    axes.set_title(title, fontsize=10)
    figure.legend(fontsize=7, ncols=6, loc="outside lower center")
    _save(path)


def _save(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pyplot.savefig(path, dpi=110)
    pyplot.close()
