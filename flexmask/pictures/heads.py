"""Heat maps by layer and head: density, coverage and Jensen-Shannon distance; bars of patterns by layer."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from flexmask.pictures.head_rows import HeadMap, head_map, pattern_shares, query_aware_heads, rows_of
from flexmask.pictures.style import EDGE, LEFT_OUT, METHOD, PATTERNS, legend_below, own_axes, whole_numbers

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_LARGEST_DISTANCE = math.sqrt(math.log(2))


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
    return _draw(head_map(source, "density"), axes, (0.0, 1.0), "Density: kept blocks / visible blocks")


def plot_coverage(source: Any, axes: Axes | None = None) -> Axes:
    """Draw how much of the representative rows' true attention each head's kept blocks hold.

    As `plot_density`, with ``coverage`` in the rows. Colours begin at the lowest value, rounded down to a tenth.
    """
    values = head_map(source, "coverage")
    known = [value for row in values.values for value in row if not math.isnan(value)]
    least = min(0.9, math.floor(10 * min(known, default=0.0)) / 10)
    return _draw(values, axes, (least, 1.0), "Coverage: attention of the last rows that is kept")


def plot_distances(source: Any, axes: Axes | None = None, *, tau: float | None = None) -> Axes:
    """Draw the Jensen-Shannon distance of each head's pooled estimate to its true attention; a dot marks query-aware heads.

    As `plot_density`, with ``js_distance`` and ``pattern`` in the rows; the title has `tau`. ValueError for rows without a
    distance: `flexprefill` and `published` compute them.
    """
    rows = rows_of(source)
    values = head_map(rows, "js_distance")
    if all(math.isnan(value) for row in values.values for value in row):
        raise ValueError("source must have Jensen-Shannon distances, which flexprefill and published compute; got none")
    limit = "" if tau is None else f" (query-aware below {tau:g}: dot)"
    axes = _draw(values, axes, (0.0, _LARGEST_DISTANCE), f"Jensen-Shannon distance{limit}")
    places = [(head, values.layers.index(layer)) for layer, head in query_aware_heads(rows)]
    if places:
        # in a corner, off the numbers
        x, y = [head + 0.3 for head, _ in places], [number - 0.28 for _, number in places]
        axes.scatter(x, y, s=14, c="#ffffff", edgecolors="#000000", linewidths=0.7)
    return axes


def plot_run(source: Any, tau: float | None = None) -> list[Axes]:
    """Draw density, pattern share and, where a head has one, Jensen-Shannon distance, side by side in a new figure."""
    import matplotlib.pyplot as plt

    rows = rows_of(source)
    has_distances = not all(math.isnan(row["js_distance"]) for row in rows)
    heads, layers = 1 + max(row["head"] for row in rows), len({row["layer"] for row in rows})
    number = 3 if has_distances else 2
    width, height = min(max(4.8, 1.6 + 0.42 * heads), 12), min(max(3.2, 1.6 + 0.3 * layers), 12)
    drawn = plt.subplots(1, number, figsize=(width * number, height), dpi=110, layout="constrained")[1]
    plot_density(rows, drawn[0])
    plot_pattern_share(rows, drawn[1])
    if has_distances:
        plot_distances(rows, drawn[2], tau=tau)
    return list(drawn)


def _draw(found: HeadMap, axes: Axes | None, limits: tuple[float, float], title: str) -> Axes:
    import numpy as np

    layers, heads = len(found.layers), len(found.values[0])
    axes = own_axes(axes, min(max(4.8, 1.6 + 0.42 * heads), 14), min(max(2.4, 1.6 + 0.3 * layers), 12))
    dense, values = np.array(found.dense), np.array(found.values)
    shown = np.ma.masked_array(values, mask=dense | np.isnan(values))
    image = axes.imshow(shown, cmap="cividis_r", vmin=limits[0], vmax=limits[1], aspect="auto", interpolation="nearest")
    _hatch(axes, [tuple(place) for place in np.argwhere(shown.mask & ~np.array(found.missing))], bool(dense.any()))
    if layers <= 32 and heads <= 20:
        for number, head in np.argwhere(~shown.mask):
            value = found.values[number][head]
            text = "1" if value > 0.995 else f"{value:.2f}"
            ink = "#000000" if (value - limits[0]) / (limits[1] - limits[0]) < 0.55 else "#ffffff"
            axes.text(head, number, text, ha="center", va="center", fontsize=7, color=ink)
    whole_numbers(axes.xaxis, range(heads))
    whole_numbers(axes.yaxis, found.layers)
    axes.set(xlabel="head", ylabel="layer")
    axes.set_title(title, fontsize=10)
    axes.set_xticks(np.arange(heads + 1) - 0.5, minor=True)
    axes.set_yticks(np.arange(layers + 1) - 0.5, minor=True)
    if heads <= 64:
        axes.grid(which="minor", color="#ffffff", linewidth=0.6)
    axes.tick_params(labelsize=8)
    axes.tick_params(which="minor", length=0)
    axes.figure.colorbar(image, ax=axes, pad=0.02).ax.tick_params(labelsize=8)
    return axes


def _hatch(axes: Axes, places: list[Any], any_dense: bool) -> None:
    """Hatch the cells (layer, head) without a value."""
    from matplotlib.patches import Patch, Rectangle

    style: dict[str, Any] = {"facecolor": LEFT_OUT, "edgecolor": "#8a8a92", "hatch": "///", "linewidth": 0}
    for number, head in places:
        axes.add_patch(Rectangle((head - 0.5, number - 0.5), 1, 1, **style))
    if any_dense:
        legend_below(axes, [Patch(label="ran dense", **style)])


def plot_pattern_share(source: Any, axes: Axes | None = None) -> Axes:
    """Draw the share of each layer's heads by pattern: vertical-slash, query-aware, dense, or a method without patterns.

    Parameters
    ----------
    source
        A run (`PrefillRun`), or its rows, dicts with ``layer``, ``head`` and ``pattern``; all calls and batch rows count.
    axes
        Where to draw. Default: a new figure of pyplot.

    Returns
    -------
    matplotlib.axes.Axes
        One labelled container of bars per pattern.

    Raises
    ------
    TypeError, ValueError
        For a `source` without rows or patterns.

    Examples
    --------
    >>> rows = [{"layer": 0, "head": head, "pattern": "vertical-slash" if head else "query-aware"} for head in range(4)]
    >>> [bars.get_label() for bars in plot_pattern_share(rows).containers]
    ['vertical-slash', 'query-aware']
    """
    layers, shares = pattern_shares(source)
    axes = own_axes(axes, min(max(4.8, 1.8 + 0.3 * len(layers)), 14), 3.2)
    below = [0.0] * len(layers)
    for pattern, share in shares.items():
        face, hatch = PATTERNS.get(pattern, METHOD)
        places = range(len(layers))
        axes.bar(places, share, 0.86, below, color=face, edgecolor=EDGE, linewidth=0.4, hatch=hatch, label=pattern)
        below = [low + high for low, high in zip(below, share, strict=True)]
    whole_numbers(axes.xaxis, layers)
    axes.set(xlabel="layer", ylabel="share of heads", ylim=(0, 1), xlim=(-0.6, len(layers) - 0.4))
    axes.set_title("Pattern by layer", fontsize=10)
    axes.tick_params(labelsize=8)
    legend_below(axes, ncols=4, handlelength=1.6)
    return axes
