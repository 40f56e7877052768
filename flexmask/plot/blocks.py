"""Pictures of blocks: those that a head keeps, and its true attention pooled to them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from flexmask.base.selection import listed_blocks
from flexmask.plot.charts import LEFT_OUT, new_axes

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_HIDDEN, _IN_PART, _WHOLE, _EDGE = "#ffffff", "#f0a02f", "#1f5fa8", "#444444"
_INCHES = 5.0  # side of the square
_LEAST_MASS = 1e-4  # of a row's attention
# light blue to near black; the lightest is darker than `LEFT_OUT`, in grey too
_COLOURS = ["#bcd2ea", "#5b8fc9", "#1f4f91", "#0a1b38"]
PARTS = ("all", "kept", "left out")


def plot_block_mask(
    block_mask: BlockMask, head: int, title: str | None = None, *, batch: int = 0, axes: Axes | None = None
) -> Axes:
    """Draw which blocks one head keeps.

    Blocks kept whole and in part (by their mask_mod) differ in colour; grey blocks are those that only dense causal attention
    computes. The line is causality, with the last query at the last key.

    Parameters
    ----------
    block_mask
        Of shape (batch, num_heads, q_len, kv_len), read on the host.
    head
        In [0, num_heads).
    title
        To which the density is added. Default None: ``head 3``.
    batch
        Batch row. Default 0.
    axes
        Where to draw. Default: a new figure of pyplot, with a legend.

    Raises
    ------
    ValueError
        For a head or batch row out of range.

    Examples
    --------
    >>> from torch.nn.attention.flex_attention import create_block_mask
    >>> mask = create_block_mask(lambda b, h, q, k: k <= q, 1, 2, 512, 512, device="cpu")
    >>> plot_block_mask(mask, 1).get_title()  # .figure.savefig("mask.png")
    'head 1, density 100.0%'
    """
    kinds = block_kinds(block_mask, head, batch)

    from matplotlib.colors import ListedColormap

    axes = _new_axes(kinds) if axes is None else axes
    colours = {"cmap": ListedColormap([_HIDDEN, LEFT_OUT, _IN_PART, _WHOLE]), "vmin": 0, "vmax": 3}
    q_len, kv_len = block_mask.shape[-2:]
    _draw(axes, kinds.numpy(), (q_len, kv_len, *block_mask.BLOCK_SIZE), colours)
    density = (kinds >= 2).sum() / (kinds >= 1).sum()
    axes.set_title(f"{f'head {head}' if title is None else title}, density {density:.1%}", fontsize=11)
    return axes


def _new_axes(kinds: Tensor) -> Axes:
    import matplotlib.pyplot as plt
    from matplotlib.patches import Patch

    # at least two dots per block
    dots = max(110, 2 * max(kinds.shape) / (0.85 * _INCHES))
    figure, axes = plt.subplots(figsize=(_INCHES + 0.4, _INCHES + 0.8), dpi=dots, layout="constrained")
    names = ((_WHOLE, "kept whole"), (_IN_PART, "kept in part"), (LEFT_OUT, "left out"))
    handles = [Patch(facecolor=colour, edgecolor="#999999", label=name) for colour, name in names]
    figure.legend(handles=handles, loc="outside lower center", ncols=3, frameon=False, fontsize=10)
    return axes


def block_kinds(block_mask: BlockMask, head: int, batch: int = 0) -> Tensor:
    """Classify every block of one head; arguments and errors as in `plot_block_mask`.

    Returns
    -------
    Tensor
        (num_q_blocks, num_kv_blocks) int64 on the CPU: 0 hidden by causality, 1 left out, 2 kept in part, 3 kept whole.
    """
    num_batch, num_heads, q_len, kv_len = block_mask.shape
    for name, index, count in (("head", head, num_heads), ("batch", batch, num_batch)):
        if not 0 <= index < count:
            raise ValueError(f"{name} must be in [0, {count}); got {index}")
    columns = block_mask.kv_indices.shape[-1]
    partial = listed_blocks(block_mask.kv_num_blocks[batch, head], block_mask.kv_indices[batch, head], columns).cpu()
    full = torch.zeros_like(partial)
    if block_mask.full_kv_num_blocks is not None and block_mask.full_kv_indices is not None:
        full = listed_blocks(block_mask.full_kv_num_blocks[batch, head], block_mask.full_kv_indices[batch, head], columns).cpu()
    q_block, kv_block = block_mask.BLOCK_SIZE
    q_blocks, kv_blocks = (torch.arange(count, device="cpu") for count in partial.shape)
    last_row = (q_block * (q_blocks + 1)).clamp(max=q_len) - 1 + kv_len - q_len
    visible = kv_block * kv_blocks <= last_row[:, None]
    return torch.where(full, 3, torch.where(partial, 2, visible.long()))


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

    axes = new_axes(5.9, 5.0) if axes is None else axes
    size = (q_len, kv_len, block_size, block_size)
    _draw(axes, visible.numpy().astype(int), size, {"cmap": ListedColormap([_HIDDEN, LEFT_OUT]), "vmin": 0, "vmax": 1})
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


def _draw(axes: Axes, values: Any, size: tuple[int, int, int, int], colours: dict[str, Any]) -> Any:
    """Draw one value per block, and the causal line; `size` is q_len, kv_len and the tokens per block of query and key."""
    q_len, kv_len, q_block, kv_block = size
    extent = (0, values.shape[1] * kv_block, values.shape[0] * q_block, 0)
    image = axes.imshow(values, interpolation="nearest", extent=extent, aspect="equal", **colours)
    axes.plot([kv_len - q_len, kv_len], [0, q_len], color=_EDGE, linewidth=0.4)
    axes.set(xlabel="key (tokens)", ylabel="query (tokens)", xlim=(0, kv_len), ylim=(q_len, 0))
    axes.ticklabel_format(style="plain")
    axes.locator_params(nbins=5)
    return image
