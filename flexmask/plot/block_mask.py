"""The blocks that a head keeps."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from flexmask.plot.style import HIDDEN, IN_PART, LEFT_OUT, WHOLE, draw_blocks

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_INCHES = 5.0  # side of the square


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

    Returns
    -------
    matplotlib.axes.Axes

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
    colours = {"cmap": ListedColormap([HIDDEN, LEFT_OUT, IN_PART, WHOLE]), "vmin": 0, "vmax": 3}
    q_len, kv_len = block_mask.shape[-2:]
    draw_blocks(axes, kinds.numpy(), (q_len, kv_len, *block_mask.BLOCK_SIZE), colours)
    density = (kinds >= 2).sum() / (kinds >= 1).sum()
    axes.set_title(f"{f'head {head}' if title is None else title}, density {density:.1%}", fontsize=11)
    axes.set_ylabel("query (tokens)")
    return axes


def _new_axes(kinds: Tensor) -> Axes:
    import matplotlib.pyplot as plt
    from matplotlib.patches import Patch

    # at least two dots per block
    dots = max(110, 2 * max(kinds.shape) / (0.85 * _INCHES))
    figure, axes = plt.subplots(figsize=(_INCHES + 0.4, _INCHES + 0.8), dpi=dots, layout="constrained")
    names = ((WHOLE, "kept whole"), (IN_PART, "kept in part"), (LEFT_OUT, "left out"))
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
    partial = _listed(block_mask.kv_num_blocks[batch, head], block_mask.kv_indices[batch, head])
    full = torch.zeros_like(partial)
    if block_mask.full_kv_num_blocks is not None and block_mask.full_kv_indices is not None:
        full = _listed(block_mask.full_kv_num_blocks[batch, head], block_mask.full_kv_indices[batch, head])
    q_block, kv_block = block_mask.BLOCK_SIZE
    q_blocks, kv_blocks = (torch.arange(count, device="cpu") for count in partial.shape)
    last_row = (q_block * (q_blocks + 1)).clamp(max=q_len) - 1 + kv_len - q_len
    visible = kv_block * kv_blocks <= last_row[:, None]
    return torch.where(full, 3, torch.where(partial, 2, visible.long()))


def _listed(counts: Tensor, indices: Tensor) -> Tensor:
    """A (num_q_blocks, num_kv_blocks) bool map of the first `counts` entries of each row of `indices`, on the CPU."""
    counts, indices = counts.cpu(), indices.cpu().long()
    rows, columns = torch.nonzero(torch.arange(indices.shape[-1], device="cpu") < counts[:, None], as_tuple=True)
    kept = torch.zeros_like(indices, dtype=torch.bool)
    kept[rows, indices[rows, columns]] = True
    return kept
