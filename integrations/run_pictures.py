"""A run's pictures side by side."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from flexmask.plot import plot_density, plot_distances, plot_pattern_share

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def plot_rows(rows: Sequence[dict[str, Any]], tau: float) -> list[Axes]:
    """Density, pattern share and, where a head has one, Jensen-Shannon distance, in one new figure of pyplot."""
    import matplotlib.pyplot as plt

    # NaN is unequal to itself
    has_distances = any(row["distance"] == row["distance"] for row in rows)
    heads = 1 + max((row["head"] for row in rows), default=0)
    layers = len({row["layer"] for row in rows})
    number = 3 if has_distances else 2
    width, height = min(max(4.8, 1.6 + 0.42 * heads), 12), min(max(3.2, 1.6 + 0.3 * layers), 12)
    drawn = plt.subplots(1, number, figsize=(width * number, height), dpi=110, layout="constrained")[1]
    plot_density(rows, drawn[0])
    plot_pattern_share(rows, drawn[1])
    if has_distances:
        plot_distances(rows, drawn[2], tau=tau)
    return list(drawn)
