"""Pictures of numbers: the density of every head by layer, and what methods lose by how much they keep."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import cycle
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# all colours differ in lightness, so that each picture reads in grey
LEFT_OUT = "#e9e9ed"
# Okabe and Ito's colours from dark to light, each with a marker and a dash
LINES: tuple[tuple[str, str, str], ...] = (
    ("#000000", "o", "-"),
    ("#0072b2", "s", "--"),
    ("#d55e00", "^", "-."),
    ("#009e73", "D", ":"),
    ("#cc79a7", "v", "-"),
    ("#e69f00", "P", "--"),
    ("#56b4e9", "X", "-."),
)
_MOST_POINTS = 24  # with a marker each


def new_axes(width: float, height: float) -> Axes:
    """Of a new figure of pyplot, which notebooks show."""
    import matplotlib.pyplot as plt

    return plt.subplots(figsize=(width, height), dpi=130, layout="constrained")[1]


def plot_density(source: Any, axes: Axes | None = None) -> Axes:
    """Draw the density of each head, one row per layer; layers that ran dense are hatched.

    Parameters
    ----------
    source
        A run (`PrefillRun`), the result of `tune`, or their rows, dicts with ``layer``, ``head`` and ``density``. Values are
        means over batch rows and over calls that ran sparse, if any did.
    axes
        Where to draw. Default: a new figure of pyplot.

    Returns
    -------
    matplotlib.axes.Axes
        Its first image holds the values, masked where a layer ran dense.

    Raises
    ------
    TypeError, ValueError
        For a `source` without rows.

    Examples
    --------
    >>> rows = [{"layer": layer, "head": head, "density": 0.1 * head} for layer in range(2) for head in range(4)]
    >>> plot_density(rows).get_title()
    'Density: kept blocks / visible blocks'
    """
    import numpy as np
    from matplotlib.patches import Rectangle

    rows = _rows_of(source)
    layers, num_heads = sorted({row["layer"] for row in rows}), 1 + max(row["head"] for row in rows)
    by_head: dict[tuple[int, int], list[Mapping[str, Any]]] = {}
    for row in rows:
        by_head.setdefault((layers.index(row["layer"]), row["head"]), []).append(row)
    values = np.full((len(layers), num_heads), np.nan)
    for place, calls in by_head.items():
        sparse = [row["density"] for row in calls if row.get("pattern") != "dense"]
        values[place] = np.mean(sparse) if sparse else np.nan
    if axes is None:
        axes = new_axes(min(max(4.8, 1.6 + 0.42 * num_heads), 14), min(max(2.4, 1.6 + 0.3 * len(layers)), 12))
    shown = np.ma.masked_invalid(values)
    image = axes.imshow(shown, cmap="cividis_r", vmin=0, vmax=1, aspect="auto", interpolation="nearest")
    # layers may differ in their number of heads
    dense = [place for place in by_head if np.isnan(values[place])]
    for layer, head in dense:
        axes.add_patch(
            Rectangle((head - 0.5, layer - 0.5), 1, 1, facecolor=LEFT_OUT, edgecolor="#8a8a92", hatch="///", linewidth=0)
        )
    if len(layers) <= 32 and num_heads <= 20:
        for layer, head in np.argwhere(~shown.mask):
            value = values[layer, head]
            text, ink = "1" if value > 0.995 else f"{value:.2f}", "#000000" if value < 0.55 else "#ffffff"
            axes.text(head, layer, text, ha="center", va="center", fontsize=7, color=ink)
    _whole_numbers(axes.xaxis, range(num_heads))
    _whole_numbers(axes.yaxis, layers)
    axes.set(xlabel="head (hatched: ran dense)" if dense else "head", ylabel="layer")
    axes.set_title("Density: kept blocks / visible blocks", fontsize=10)
    axes.tick_params(labelsize=8)
    axes.figure.colorbar(image, ax=axes, pad=0.02).ax.tick_params(labelsize=8)
    return axes


def _rows_of(source: Any) -> list[Mapping[str, Any]]:
    """The rows of a run or of a tuning result, or rows as they are, at least one."""
    given = source.rows() if callable(getattr(source, "rows", None)) else source
    if not isinstance(given, Iterable) or isinstance(given, (str, bytes, Mapping)):
        raise TypeError(f"source must have rows(), as a run has, or be such rows; got {type(source).__name__}")
    rows = list(given)
    if not all(isinstance(row, Mapping) and {"layer", "head"} <= row.keys() for row in rows):
        raise TypeError("source must have rows that are dicts with layer and head")
    if not rows:
        raise ValueError("source must hold at least one prefill call; got none (collect_stats=False keeps no statistics)")
    if not all("density" in row for row in rows):
        raise ValueError(f"source must have density in every row; got {', '.join(map(str, rows[0]))}")
    return rows


def _whole_numbers(axis: Any, labels: Sequence[int], most: int = 20) -> None:
    """Tick every layer or head, or as many as fit; `axis` is ``axes.xaxis`` or ``axes.yaxis``."""
    step = next(step for step in (1, 2, 4, 5, 8, 10, 16, 20, 32, 50, 100, len(labels)) if step * most >= len(labels))
    places = range(0, len(labels), step)
    axis.set_ticks(places, labels=[str(labels[place]) for place in places])


def plot_frontier(
    methods: Mapping[str, Sequence[tuple[float, float]]],
    axes: Axes | None = None,
    *,
    error: str = "relative squared error of a head's output",
) -> Axes:
    """Draw what methods lose by how much they keep: the lower left is better.

    Parameters
    ----------
    methods
        By name: (density, error) pairs in any order, such as ``result.curve`` of a result of `tune`.
    axes
        Where to draw. Default: a new figure of pyplot.
    error
        The name of the vertical axis.

    Returns
    -------
    matplotlib.axes.Axes
        One labelled line per method.

    Raises
    ------
    TypeError, ValueError
        For no methods, and a method without pairs.

    Examples
    --------
    >>> axes = plot_frontier({"hybrid": [(0.3, 0.02), (0.2, 0.05)], "coverage": [(0.3, 0.04), (0.2, 0.09)]})
    >>> [line.get_label() for line in axes.get_lines()]
    ['hybrid', 'coverage']
    """
    if not isinstance(methods, Mapping):
        raise TypeError(f"methods must be a dict of name to (density, error) pairs; got {type(methods).__name__}")
    if not methods:
        raise ValueError("methods must hold at least one; got none")
    curves = {name: _points(name, points) for name, points in methods.items()}
    axes = new_axes(6.0, 4.2) if axes is None else axes
    for (name, points), (colour, marker, dash) in zip(curves.items(), cycle(LINES), strict=False):
        density, errors = zip(*points, strict=True)
        step = max(1, len(points) // _MOST_POINTS)
        axes.plot(
            density, errors, color=colour, marker=marker, linestyle=dash, label=name, markersize=5, linewidth=1.5, markevery=step
        )
    axes.set_ylim(bottom=min(0.0, axes.get_ylim()[0]))
    axes.set_xlim(left=0)
    axes.xaxis.set_major_formatter(lambda share, _: f"{100 * share:.3g}")
    axes.set(xlabel="density, %", ylabel=error)
    axes.grid(color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.legend(frameon=False, fontsize=9, handlelength=3)
    return axes


def _points(name: str, points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    pairs = [tuple(map(float, point)) for point in points]
    if not pairs or any(len(pair) != 2 for pair in pairs):
        raise ValueError(f"methods[{name!r}] must hold (density, error) pairs, at least one; got {points!r}")
    return sorted((density, value) for density, value in pairs)
