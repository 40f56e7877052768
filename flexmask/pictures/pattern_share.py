"""Bars by layer: the share of the heads by pattern."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from flexmask.pictures.head_rows import pattern_shares
from flexmask.pictures.style import EDGE, METHOD, PATTERNS, legend_below, own_axes, whole_numbers

if TYPE_CHECKING:
    from matplotlib.axes import Axes


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
