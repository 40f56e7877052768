"""A head's true attention, pooled to blocks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from flexmask.plot.style import HIDDEN, LEFT_OUT, draw_blocks, own_axes

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_LEAST_MASS = 1e-4  # of a row's attention
# light blue to near black; the lightest is darker than `LEFT_OUT`, in grey too
_COLOURS = ["#bcd2ea", "#5b8fc9", "#1f4f91", "#0a1b38"]
PARTS = ("all", "kept", "left out")


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

    axes = own_axes(axes, 5.9, 5.0)
    size = (q_len, kv_len, block_size, block_size)
    draw_blocks(axes, visible.numpy().astype(int), size, {"cmap": ListedColormap([HIDDEN, LEFT_OUT]), "vmin": 0, "vmax": 1})
    shown = np.ma.masked_array(values.clamp(min=_LEAST_MASS).numpy(), mask=~wanted.numpy())
    image = draw_blocks(
        axes, shown, size, {"cmap": LinearSegmentedColormap.from_list("attention", _COLOURS), "norm": LogNorm(_LEAST_MASS, 1)}
    )
    share = float((values * wanted).nansum() / values.nansum())
    names = {"all": "True attention", "kept": f"Kept: {share:.1%} of it", "left out": f"Left out: {share:.1%} of it"}
    axes.set_title(names[part], fontsize=11)
    axes.set_ylabel("query (tokens)")
    bar = axes.figure.colorbar(image, ax=axes, pad=0.02, shrink=0.8)
    bar.ax.tick_params(labelsize=8)
    bar.set_label("share of a row's attention", fontsize=8)
    return axes
