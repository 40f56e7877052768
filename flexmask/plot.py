"""Pictures of a run's heads, and of a mask over true attention; they need matplotlib.

Each function draws on `axes` or on a new figure of pyplot and returns the Axes:
``plot_density(run).figure.savefig("density.png")``. Both read in grey. Nothing imports matplotlib before it draws.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["plot_attention", "plot_density"]
# light to dark; what is left out is lighter than what is kept, in grey too
_KEPT, _LEFT_OUT = ("#5b8fc9", "#1f4f91", "#0a1b38"), ("#fdf3e7", "#f2c48d", "#e5a25a")
_MIN_MASS = 1e-4  # of a row's attention


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
    ValueError
        For a `source` without such rows.

    Examples
    --------
    >>> rows = [{"layer": layer, "head": head, "density": 0.1 * head} for layer in range(2) for head in range(4)]
    >>> plot_density(rows).get_title()
    'Density: kept blocks / visible blocks'
    """
    import numpy as np

    rows = list(source.rows() if hasattr(source, "rows") else source)
    if not rows or not all(isinstance(row, Mapping) and {"layer", "head", "density"} <= row.keys() for row in rows):
        expected = "source must have rows with layer, head and density"
        raise ValueError(f"{expected}; got {rows[:1] or 'none (collect_stats=False keeps no statistics)'}")
    layers, num_heads = sorted({row["layer"] for row in rows}), 1 + max(row["head"] for row in rows)
    sparse: dict[tuple[int, int], list[float]] = {}
    for row in rows:
        values = sparse.setdefault((layers.index(row["layer"]), row["head"]), [])
        values += [row["density"]] if row.get("pattern") != "dense" else []
    shown = np.ma.masked_all((len(layers), num_heads))
    axes = _new_axes(min(4 + 0.3 * num_heads, 14), min(2 + 0.25 * len(layers), 12)) if axes is None else axes
    # layers may differ in their number of heads
    for (layer, head), values in sparse.items():
        if values:
            shown[layer, head] = np.mean(values)
        else:
            place = (layer - 0.5, layer + 0.5, head / num_heads, (head + 1) / num_heads)
            axes.axhspan(*place, facecolor="#e9e9ed", edgecolor="#8a8a92", hatch="///", linewidth=0)
    image = axes.imshow(shown, cmap="cividis_r", vmin=0, vmax=1, aspect="auto", interpolation="nearest")
    every = -(-len(layers) // 20)
    axes.set_yticks(range(0, len(layers), every), labels=[str(layer) for layer in layers[::every]])
    axes.set_xticks(range(0, num_heads, -(-num_heads // 20)))
    axes.set(xlabel="head (hatched: ran dense)" if not all(sparse.values()) else "head", ylabel="layer")
    axes.set_title("Density: kept blocks / visible blocks", fontsize=10)
    axes.figure.colorbar(image, ax=axes, pad=0.02)
    return axes


def plot_attention(
    mass: Tensor, block_size: int, kept: Tensor, axes: Axes | None = None, *, lengths: tuple[int, int] | None = None
) -> Axes:
    """Draw a head's attention by blocks, in blue where the mask keeps it and in orange where it does not.

    Colours are logarithmic, from 1e-4 of a row's attention to all of it.

    Parameters
    ----------
    mass
        (num_q_blocks, num_kv_blocks): attention of the query block's rows to the key block, mean over rows. NaN and blocks above
        the causal line are not drawn.
    block_size
        Tokens per block.
    kept
        (num_q_blocks, num_kv_blocks) bool.
    axes
        Where to draw. Default: a new figure of pyplot.
    lengths
        q_len and kv_len. Default None: whole blocks.

    Returns
    -------
    matplotlib.axes.Axes
        Its first image holds the kept masses, its second the others; the title has the kept share.

    Raises
    ------
    ValueError
        For shapes that differ.
    """
    import numpy as np
    from matplotlib.colors import LinearSegmentedColormap, LogNorm

    if mass.dim() != 2 or kept.shape != mass.shape:
        shapes = f"{tuple(mass.shape)} and {tuple(kept.shape)}"
        raise ValueError(f"mass and kept must both be (num_q_blocks, num_kv_blocks); got {shapes}")
    values, kept, (rows, columns) = mass.detach().double().cpu(), kept.cpu().bool(), mass.shape
    q_len, kv_len = lengths or (rows * block_size, columns * block_size)
    last_row = (block_size * (torch.arange(rows, device="cpu") + 1)).clamp(max=q_len) - 1 + kv_len - q_len
    visible = block_size * torch.arange(columns, device="cpu") <= last_row[:, None]
    axes = _new_axes(6.4, 5.0) if axes is None else axes
    for name, colours, part in (("kept", _KEPT, kept), ("left out", _LEFT_OUT, ~kept)):
        image = axes.imshow(
            np.ma.masked_array(values.clamp(min=_MIN_MASS).numpy(), mask=~(visible & part).numpy()),
            cmap=LinearSegmentedColormap.from_list(name, colours),
            norm=LogNorm(_MIN_MASS, 1),
            interpolation="nearest",
            extent=(0, columns * block_size, rows * block_size, 0),
        )
        axes.figure.colorbar(image, ax=axes, pad=0.02, shrink=0.8, label=f"share of a row's attention, {name}")
    axes.set(xlabel="key (tokens)", ylabel="query (tokens)", xlim=(0, kv_len), ylim=(q_len, 0))
    axes.locator_params(nbins=5)
    axes.set_title(f"Attention; the mask holds {float((values * kept).nansum() / values.nansum()):.1%}", fontsize=10)
    return axes


def _new_axes(width: float, height: float) -> Axes:
    """The axes of a new figure of pyplot, which notebooks show."""
    import matplotlib.pyplot as plt

    return plt.subplots(figsize=(width, height), dpi=130, layout="constrained")[1]
