"""Colours and axes that the pictures share; colours differ in lightness, so each picture reads in grey."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes

HIDDEN, LEFT_OUT, IN_PART, WHOLE = "#ffffff", "#e9e9ed", "#f0a02f", "#1f5fa8"
EDGE = "#444444"

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


def own_axes(axes: Axes | None, width: float, height: float) -> Axes:
    """`axes`, or those of a new figure of pyplot, which notebooks show."""
    if axes is not None:
        return axes
    import matplotlib.pyplot as plt

    return plt.subplots(figsize=(width, height), dpi=130, layout="constrained")[1]


def draw_blocks(axes: Axes, values: Any, size: tuple[int, int, int, int], colours: dict[str, Any]) -> Any:
    """Draw one value per block, and the causal line; `size` is q_len, kv_len and the tokens per block of query and key."""
    q_len, kv_len, q_block, kv_block = size
    extent = (0, values.shape[1] * kv_block, values.shape[0] * q_block, 0)
    image = axes.imshow(values, interpolation="nearest", extent=extent, aspect="equal", **colours)
    axes.plot([kv_len - q_len, kv_len], [0, q_len], color=EDGE, linewidth=0.4)
    axes.set_xlabel("key (tokens)")
    axes.set(xlim=(0, kv_len), ylim=(q_len, 0))
    axes.ticklabel_format(style="plain")
    axes.locator_params(nbins=5)
    return image
