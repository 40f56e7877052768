"""Pictures of a run's heads and of true attention; they need matplotlib.

Each function draws on `axes` or on a new figure of pyplot and returns the Axes:
``plot_density(run).figure.savefig("density.png")``. Every picture reads in grey. Nothing imports matplotlib before it draws.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["plot_attention", "plot_density"]
PARTS = ("all", "kept", "left out")
# all colours differ in lightness, so that each picture reads in grey
_HIDDEN, _LEFT_OUT, _EDGE = "#ffffff", "#e9e9ed", "#444444"
# light blue to near black; the lightest is darker than `_LEFT_OUT`, in grey too
_COLOURS = ["#bcd2ea", "#5b8fc9", "#1f4f91", "#0a1b38"]
_LEAST_MASS = 1e-4  # of a row's attention


def plot_density(source: Any, axes: Axes | None = None) -> Axes:
    """Draw the density of each head, one row per layer; layers that ran dense are hatched.

    Parameters
    ----------
    source
        A run (`PrefillRun`) or its rows, dicts with ``layer``, ``head`` and ``density``. Values are
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

    rows = _checked_rows(source)
    layers, num_heads = sorted({row["layer"] for row in rows}), 1 + max(row["head"] for row in rows)
    by_head: dict[tuple[int, int], list[Mapping[str, Any]]] = {}
    for row in rows:
        by_head.setdefault((layers.index(row["layer"]), row["head"]), []).append(row)
    values = np.full((len(layers), num_heads), np.nan)
    for place, calls in by_head.items():
        sparse = [row["density"] for row in calls if row.get("pattern") != "dense"]
        values[place] = np.mean(sparse) if sparse else np.nan
    if axes is None:
        axes = _new_axes(min(max(4.8, 1.6 + 0.42 * num_heads), 14), min(max(2.4, 1.6 + 0.3 * len(layers)), 12))
    shown = np.ma.masked_invalid(values)
    image = axes.imshow(shown, cmap="cividis_r", vmin=0, vmax=1, aspect="auto", interpolation="nearest")
    # layers may differ in their number of heads
    dense = [place for place in by_head if np.isnan(values[place])]
    for layer, head in dense:
        axes.add_patch(
            Rectangle((head - 0.5, layer - 0.5), 1, 1, facecolor=_LEFT_OUT, edgecolor="#8a8a92", hatch="///", linewidth=0)
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


def _checked_rows(source: Any) -> list[Mapping[str, Any]]:
    """The rows of a run, or rows as they are, at least one."""
    rows = source.rows() if callable(getattr(source, "rows", None)) else source
    if not isinstance(rows, Iterable) or isinstance(rows, (str, bytes, Mapping)):
        raise TypeError(f"source must have rows(), as a run has, or be such rows; got {type(source).__name__}")
    rows = list(rows)
    if not all(isinstance(row, Mapping) and {"layer", "head"} <= row.keys() for row in rows):
        raise TypeError("source must have rows that are dicts with layer and head")
    if not rows:
        raise ValueError("source must hold at least one prefill call; got none (collect_stats=False keeps no statistics)")
    if not all("density" in row for row in rows):
        raise ValueError(f"source must have density in every row; got {', '.join(map(str, rows[0]))}")
    return rows


def _whole_numbers(axis: Any, labels: Sequence[int]) -> None:
    """Tick every layer or head, or as many as fit; `axis` is ``axes.xaxis`` or ``axes.yaxis``."""
    every = next(every for every in (1, 2, 4, 5, 8, 10, 16, 20, 32, 50, 100, len(labels)) if every * 20 >= len(labels))
    places = range(0, len(labels), every)
    axis.set_ticks(places, labels=[str(labels[place]) for place in places])


def plot_attention(
    mass: Tensor,
    block_size: int,
    kept: Tensor | None = None,
    part: str = "all",
    axes: Axes | None = None,
    *,
    lengths: tuple[int, int] | None = None,
) -> Axes:
    """Draw a head's attention pooled to blocks, in logarithmic colours from 1e-4 of a row's attention to all of it.

    Parameters
    ----------
    mass
        (num_q_blocks, num_kv_blocks): attention of the query block's rows to the key block, mean over rows. NaN and blocks above
        the causal line are not drawn.
    block_size
        Tokens per block.
    kept
        (num_q_blocks, num_kv_blocks) bool, for the last two parts. Default None.
    part
        ``"all"`` (default), ``"kept"`` or ``"left out"`` by the mask; the rest is grey.
    axes
        Where to draw. Default: a new figure of pyplot.
    lengths
        q_len and kv_len. Default None: whole blocks.

    Returns
    -------
    matplotlib.axes.Axes
        Its last image holds the masses drawn; the title has their share of all attention.

    Raises
    ------
    ValueError
        For another `part`, a part without `kept`, and shapes that differ.
    """
    import numpy as np
    from matplotlib.colors import LinearSegmentedColormap, ListedColormap, LogNorm

    if part not in PARTS:
        raise ValueError(f"part must be one of {', '.join(PARTS)}; got {part!r}")
    if mass.dim() != 2 or (kept is not None and kept.shape != mass.shape):
        shapes = [tuple(tensor.shape) for tensor in (mass, kept) if tensor is not None]
        raise ValueError(f"mass and kept must both be (num_q_blocks, num_kv_blocks); got {shapes}")
    if part != "all" and kept is None:
        raise ValueError(f'kept must be given for part "{part}"')
    values = mass.detach().double().cpu()
    q_len, kv_len = lengths or (mass.shape[0] * block_size, mass.shape[1] * block_size)
    last_row = (block_size * (torch.arange(mass.shape[0], device="cpu") + 1)).clamp(max=q_len) - 1 + kv_len - q_len
    visible = block_size * torch.arange(mass.shape[1], device="cpu") <= last_row[:, None]
    wanted = visible if part == "all" or kept is None else visible & (kept.cpu() if part == "kept" else ~kept.cpu())

    axes = _new_axes(5.9, 5.0) if axes is None else axes
    size = (q_len, kv_len, block_size)
    _draw(axes, visible.numpy().astype(int), size, {"cmap": ListedColormap([_HIDDEN, _LEFT_OUT]), "vmin": 0, "vmax": 1})
    shown = np.ma.masked_array(values.clamp(min=_LEAST_MASS).numpy(), mask=~wanted.numpy())
    image = _draw(
        axes, shown, size, {"cmap": LinearSegmentedColormap.from_list("attention", _COLOURS), "norm": LogNorm(_LEAST_MASS, 1)}
    )
    share = float((values * wanted).nansum() / values.nansum())
    names = {"all": "True attention", "kept": f"Kept: {share:.1%} of it", "left out": f"Left out: {share:.1%} of it"}
    axes.set_title(names[part], fontsize=11)
    bar = axes.figure.colorbar(image, ax=axes, pad=0.02, shrink=0.8)
    bar.ax.tick_params(labelsize=8)
    bar.set_label("share of a row's attention", fontsize=8)
    return axes


def _draw(axes: Axes, values: Any, size: tuple[int, int, int], colours: dict[str, Any]) -> Any:
    """Draw one value per block, and the causal line; `size` is q_len, kv_len and the tokens per block."""
    q_len, kv_len, block_size = size
    extent = (0, values.shape[1] * block_size, values.shape[0] * block_size, 0)
    image = axes.imshow(values, interpolation="nearest", extent=extent, aspect="equal", **colours)
    axes.plot([kv_len - q_len, kv_len], [0, q_len], color=_EDGE, linewidth=0.4)
    axes.set(xlabel="key (tokens)", ylabel="query (tokens)", xlim=(0, kv_len), ylim=(q_len, 0))
    axes.ticklabel_format(style="plain")
    axes.locator_params(nbins=5)
    return image


def _new_axes(width: float, height: float) -> Axes:
    """Of a new figure of pyplot, which notebooks show."""
    import matplotlib.pyplot as plt

    return plt.subplots(figsize=(width, height), dpi=130, layout="constrained")[1]
