"""The report's pictures; needs matplotlib, no GPU.

Every method looks the same in every picture: a colour from the Okabe-Ito palette, which is safe for colour-blind readers, and a
marker and line style that survive greyscale. Lines are labelled at their ends. No picture has more than six of them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bench.reporting.tables import thousands

Line = list[tuple[float, float]]

MOST_LINES = 6
_MOST_TICKS = 12
_WIDE = (11.0, 4.6)
_SINGLE = (7.5, 4.6)
_LABEL_GAP = 0.055  # of the axes' height, between the names at line ends

# Okabe and Ito, "Color Universal Design" (2008), with grey in place of yellow, which is too light for lines on white
BLACK, ORANGE, SKY, GREEN = "#000000", "#E69F00", "#56B4E9", "#009E73"
BLUE, VERMILLION, PURPLE, GREY = "#0072B2", "#D55E00", "#CC79A7", "#999999"


@dataclass(frozen=True)
class Style:
    """Look of one method or stage; `title` is its name in pictures."""

    title: str
    colour: str
    line: str = "-"
    marker: str = "o"


# FlexPrefill's calls and kernels are solid, dense attention is dashed, figures from elsewhere are dotted
STYLES = {
    "dense cuDNN": Style("dense cuDNN", BLACK, "--", "s"),
    "dense SDPA": Style("dense SDPA", BLACK, "--", "s"),
    "dense FlashAttention-2": Style("dense FlashAttention-2", GREY, "--", "v"),
    "dense flex flash": Style("dense flex, FLASH", SKY, "--", "D"),
    "dense flex triton": Style("dense flex, Triton", PURPLE, "--", "^"),
    "dense flex cpu": Style("dense flex, CPU", SKY, "--", "D"),
    "call flash": Style("whole call, FLASH", BLUE, "-", "o"),
    "call triton": Style("whole call, Triton", ORANGE, "-", "^"),
    "call cpu": Style("whole call, CPU", BLUE, "-", "o"),
    "kernel flash": Style("kernel alone, FLASH", BLUE, "-.", "o"),
    "kernel triton": Style("kernel alone, Triton", ORANGE, "-.", "^"),
    "kernel cpu": Style("kernel alone, CPU", BLUE, "-.", "o"),
    "mask": Style("mask alone", GREEN, "-", "P"),
    "published call": Style("published call", VERMILLION, ":", "X"),
    "published mask": Style("published mask", VERMILLION, ":", "*"),
}
# lengths and stages have an order instead of a family; six of each at most
SEQUENCE = [
    Style("", SKY, ":", "v"),
    Style("", BLUE, "-.", "D"),
    Style("", GREEN, "--", "s"),
    Style("", ORANGE, "-", "^"),
    Style("", VERMILLION, "-", "o"),
    Style("", BLACK, "-", "P"),
]
_HATCHES = ("", "///", "", "xxx", "", "...")


def over_lengths(left: Mapping[str, Line], right: Mapping[str, Line], path: Path, title: str, axes: tuple[str, str]) -> None:
    """Draw two panels over the prompt length, both with logarithmic axes: absolute figures, and ratios to dense attention.

    `left` and `right` hold points by method, a key of `STYLES`; `axes` names the two vertical axes.
    """
    figure, panels = pyplot.subplots(1, 2, figsize=_WIDE, layout="constrained")
    for panel, lines, name in zip(panels, (left, right), axes, strict=True):
        panel.set_xscale("log", base=2)
        panel.set_yscale("log")
        panel.set_ylabel(name)
        drawn = _draw(panel, {STYLES[method]: points for method, points in lines.items()})
        _token_ticks(panel, [x for points in lines.values() for x, _ in points])
        _name_ends(figure, panel, drawn)
    panels[1].axhline(1.0, color="black", linewidth=0.8)
    _readable_ticks(panels[1])
    _save(figure, path, title)


def over_density(lines: Mapping[str, Line], path: Path, title: str, y_label: str) -> None:
    """Draw ratios over the density, a share between 0 and 1, with a line at 1; at most six lines, in order."""
    figure, panel = pyplot.subplots(figsize=_SINGLE, layout="constrained")
    panel.set_yscale("log")
    densest = max(x for points in lines.values() for x, _ in points)
    panel.set(xlabel="density", ylabel=y_label, xlim=(0, 1.05 * densest))
    styles = [Style(name, base.colour, base.line, base.marker) for name, base in zip(lines, SEQUENCE, strict=False)]
    drawn = _draw(panel, dict(zip(styles, lines.values(), strict=True)))
    panel.axhline(1.0, color="black", linewidth=0.8)
    panel.grid(alpha=0.3)
    _readable_ticks(panel)
    _name_ends(figure, panel, drawn)
    _save(figure, path, title)


def first_calls(lines: Mapping[str, Sequence[float]], lengths: Sequence[int], path: Path, title: str) -> None:
    """Draw the seconds of calls in the order in which they ran; `lines` are by method, `lengths` are those of the calls."""
    figure, panel = pyplot.subplots(figsize=_SINGLE, layout="constrained")
    panel.set_yscale("log")
    panel.set(xlabel="call, in the order of the run", ylabel="seconds")
    points = {method: list(enumerate(map(float, seconds), 1)) for method, seconds in lines.items()}
    # no lines: neighbouring calls have nothing to do with each other
    styles = {method: replace(STYLES[method], line="none") for method in lines}
    drawn = _draw(panel, {styles[method]: [(float(x), y) for x, y in line] for method, line in points.items()})
    # the calls that compiled, with the length that made them
    slowest = {index: max(seconds[index] for seconds in lines.values()) for index in range(len(lengths))}
    for index, seconds in slowest.items():
        if seconds > 1:
            panel.annotate(
                f"{lengths[index]:,}",
                (index + 1, seconds),
                (7, 0),
                textcoords="offset points",
                fontsize=8,
                va="center",
            )
    panel.grid(alpha=0.3)
    _readable_ticks(panel)
    _name_ends(figure, panel, drawn)
    _save(figure, path, title)


def stacked(panels: Mapping[str, Mapping[str, Mapping[str, float]]], path: Path, title: str) -> None:
    """Draw bars that split a whole into shares: by panel, by bar, by part, in milliseconds; the whole stands at the bar's end."""
    bars = max(len(bars) for bars in panels.values())
    size = (_WIDE[0], 1.8 + 0.42 * bars)
    figure, all_axes = pyplot.subplots(1, len(panels), figsize=size, layout="constrained", sharey=False, squeeze=False)
    for axes, (name, group) in zip(all_axes[0], panels.items(), strict=True):
        _stack(axes, group)
        axes.set_title(name, fontsize=10, loc="left")
    handles, names = all_axes[0][0].get_legend_handles_labels()
    figure.legend(handles, names, fontsize=9, ncols=len(names), loc="outside lower center", frameon=False)
    _save(figure, path, title)


def _stack(axes: Axes, bars: Mapping[str, Mapping[str, float]]) -> None:
    names = list(bars)
    left = [0.0] * len(names)
    totals = [sum(bars[name].values()) or 1.0 for name in names]
    for number, part in enumerate(next(iter(bars.values()))):
        widths = [bars[name][part] / total for name, total in zip(names, totals, strict=True)]
        colour = (GREEN, SKY, BLUE, ORANGE, "#DDDDDD", GREY)[number % 6]
        axes.barh(
            names, widths, left=left, label=part, color=colour, hatch=_HATCHES[number % 6], edgecolor="white", linewidth=0.5
        )
        for row, (begin, width) in enumerate(zip(left, widths, strict=True)):
            if width >= 0.07:
                box = {"facecolor": "white", "edgecolor": "none", "pad": 1}
                axes.text(begin + width / 2, row, f"{width:.0%}", ha="center", va="center", fontsize=8, bbox=box)
        left = [begin + width for begin, width in zip(left, widths, strict=True)]
    for row, total in enumerate(totals):
        axes.text(1.015, row, f"{total:.3g} ms", va="center", fontsize=9)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.17)
    axes.set_xticks([0, 0.25, 0.5, 0.75, 1], ["0", "25%", "50%", "75%", "100%"])
    axes.set_xlabel("share of kernel time")
    axes.tick_params(axis="y", labelsize=9)
    axes.spines[["top", "right"]].set_visible(False)


def _draw(axes: Axes, lines: Mapping[Style, Line]) -> list[tuple[Style, tuple[float, float]]]:
    """Draw the lines; return each style with the line's last point."""
    if len(lines) > MOST_LINES:
        raise ValueError(f"a picture must have at most {MOST_LINES} lines; got {len(lines)}")
    ends = []
    for style, points in lines.items():
        x, y = zip(*sorted(points), strict=True)
        axes.plot(x, y, color=style.colour, linestyle=style.line, marker=style.marker, markersize=6, linewidth=1.6)
        ends.append((style, (x[-1], y[-1])))
    axes.spines[["top", "right"]].set_visible(False)
    return ends


def _name_ends(figure: Figure, axes: Axes, ends: Sequence[tuple[Style, tuple[float, float]]]) -> None:
    """Label each line to the right of the axes at the height of its last point; labels that would overlap move apart."""
    figure.draw_without_rendering()  # fixes limits and sizes
    to_axes = axes.transData + axes.transAxes.inverted()
    heights = sorted((float(to_axes.transform(end)[1]), number) for number, (_, end) in enumerate(ends))
    placed: list[float] = []
    for height, _ in heights:
        placed.append(max(height, placed[-1] + _LABEL_GAP) if placed else height)
    # what was pushed above the top comes back down, and pushes in turn
    ceiling = 1.0
    for index in reversed(range(len(placed))):
        placed[index] = min(placed[index], ceiling)
        ceiling = placed[index] - _LABEL_GAP
    for (_, number), height in zip(heights, placed, strict=True):
        style, end = ends[number]
        axes.annotate(
            style.title,
            end,
            (1.03, height),
            textcoords="axes fraction",
            color="black",
            fontsize=9,
            va="center",
            annotation_clip=False,
            arrowprops={"arrowstyle": "-", "color": style.colour, "linewidth": 0.8, "alpha": 0.7, "shrinkA": 1, "shrinkB": 4},
        )


def _token_ticks(axes: Axes, points: Sequence[float]) -> None:
    ticks = sorted({*points})
    if len(ticks) > _MOST_TICKS:
        ticks = [2.0**power for power in range(math.floor(math.log2(ticks[0])), math.ceil(math.log2(ticks[-1])) + 1)]
    axes.set_xticks(ticks, [thousands(tick) for tick in ticks])
    axes.minorticks_off()
    axes.set_xlabel("tokens")
    axes.grid(alpha=0.3)


def _readable_ticks(axes: Axes) -> None:
    """Label a logarithmic vertical axis with plain numbers, 1, 2 and 5 of each decade."""
    low, high = axes.get_ylim()
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    steps = (1, 2, 5) if len(decades) <= 4 else (1, 3)
    ticks = [step * 10.0**decade for decade in decades for step in steps]
    axes.set_yticks([tick for tick in ticks if low <= tick <= high], [f"{tick:g}" for tick in ticks if low <= tick <= high])
    axes.minorticks_off()
    axes.set_ylim(low, high)


def _save(figure: Figure, path: Path, title: str) -> None:
    figure.suptitle(title, fontsize=10)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
