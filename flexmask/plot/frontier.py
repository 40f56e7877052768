"""Error or loss by density, one line per method."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import cycle
from typing import TYPE_CHECKING

from flexmask.plot.style import LINES, own_axes

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MOST_POINTS = 24  # with a marker each


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
    axes = own_axes(axes, 6.0, 4.2)
    for (name, points), (colour, marker, dash) in zip(curves.items(), cycle(LINES), strict=False):
        density, errors = zip(*points, strict=True)
        every = max(1, len(points) // _MOST_POINTS)
        axes.plot(
            density, errors, color=colour, marker=marker, linestyle=dash, label=name, markersize=5, linewidth=1.5, markevery=every
        )
    axes.set_ylim(bottom=min(0.0, axes.get_ylim()[0]))
    axes.set_xlim(left=0)
    axes.xaxis.set_major_formatter(lambda share, _: f"{100 * share:.3g}")
    axes.set_xlabel("density, %")
    axes.set_ylabel(error)
    axes.grid(color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.legend(frameon=False, fontsize=9, handlelength=3)
    return axes


def _points(name: str, points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    pairs = [tuple(map(float, point)) for point in points]
    if not pairs or any(len(pair) != 2 for pair in pairs):
        raise ValueError(f"methods[{name!r}] must hold (density, error) pairs, at least one; got {points!r}")
    return sorted((density, value) for density, value in pairs)
