"""The blocks that heads keep."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, overload

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from flexmask.plot.style import HIDDEN, IN_PART, LEFT_OUT, WHOLE, draw_blocks

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_INCHES = 5.0  # side of one head's square
_KINDS = (HIDDEN, LEFT_OUT, IN_PART, WHOLE)


@overload
def plot_block_mask(
    block_mask: BlockMask, heads: int, titles: str | None = None, *, batch: int = 0, axes: Axes | None = None
) -> Axes: ...


@overload
def plot_block_mask(
    block_mask: BlockMask | Sequence[BlockMask],
    heads: Sequence[int],
    titles: Sequence[str] | None = None,
    *,
    batch: int = 0,
    axes: Sequence[Axes] | None = None,
) -> list[Axes]: ...


def plot_block_mask(
    block_mask: BlockMask | Sequence[BlockMask],
    heads: int | Sequence[int],
    titles: str | Sequence[str] | None = None,
    *,
    batch: int = 0,
    axes: Axes | Sequence[Axes] | None = None,
) -> Axes | list[Axes]:
    """Draw which blocks one head keeps, or several heads side by side.

    Blocks kept whole and in part (by their mask_mod) differ in colour; grey blocks are those that only dense causal attention
    computes. The line is causality, with the last query at the last key.

    Parameters
    ----------
    block_mask
        Of shape (batch, num_heads, q_len, kv_len), read on the host; or one mask per head, of equal lengths and block size.
    heads
        A head, or heads, each in [0, num_heads).
    titles
        One line per head, to which the density is added. Default None: ``head 3``.
    batch
        Batch row. Default 0.
    axes
        One Axes per head. Default None: a new figure of pyplot, with a legend.

    Returns
    -------
    matplotlib.axes.Axes or list
        One Axes for an int, else a list.

    Raises
    ------
    ValueError
        For a head or batch row out of range, and for masks, titles or axes that are not one per head.

    Examples
    --------
    >>> from torch.nn.attention.flex_attention import create_block_mask
    >>> mask = create_block_mask(lambda b, h, q, k: k <= q, 1, 2, 512, 512, device="cpu")
    >>> plot_block_mask(mask, 1).get_title()
    'head 1, density 100.0%'
    >>> figure = plot_block_mask(mask, [0, 1])[0].figure  # figure.savefig("masks.png")
    """
    if isinstance(heads, int):
        one: Any = {"titles": None if titles is None else [titles], "axes": None if axes is None else [axes]}
        return plot_block_mask(block_mask, [heads], batch=batch, **one)[0]
    if not heads:
        raise ValueError("heads must name at least one head; got none")
    masks = [block_mask] * len(heads) if isinstance(block_mask, BlockMask) else list(block_mask)
    titles = [f"head {head}" for head in heads] if titles is None else titles
    parts: dict[str, Any] = {"block_mask": masks, "titles": titles, "axes": axes}
    for name, given in parts.items():
        if given is not None and len(given) != len(heads):
            raise ValueError(f"{name} must be one per head ({len(heads)}); got {len(given)}")
    sizes = {(*mask.shape[-2:], *mask.BLOCK_SIZE) for mask in masks}
    if len(sizes) > 1:
        raise ValueError(f"block_mask must have one (q_len, kv_len, q_block, kv_block); got {sorted(sizes)}")
    kinds = [block_kinds(mask, head, batch) for mask, head in zip(masks, heads, strict=True)]

    from matplotlib.colors import ListedColormap

    drawn = _new_row(kinds[0], len(kinds)) if axes is None else list(parts["axes"])
    size: Any = sizes.pop()
    for axis, kind, title in zip(drawn, kinds, titles, strict=True):
        draw_blocks(axis, kind.numpy(), size, {"cmap": ListedColormap(_KINDS), "vmin": 0, "vmax": 3})
        axis.set_title(f"{title}, density {(kind >= 2).sum() / (kind >= 1).sum():.1%}", fontsize=11)
    drawn[0].set_ylabel("query (tokens)")
    return drawn


def _new_row(kinds: Tensor, number: int) -> list[Axes]:
    """A new figure with its legend, and axes side by side."""
    import matplotlib.pyplot as plt
    from matplotlib.patches import Patch

    # at least two dots per block
    dots = max(110, 2 * max(kinds.shape) / (0.85 * _INCHES))
    figure = plt.figure(figsize=(_INCHES * number + 0.4, _INCHES + 0.8), dpi=dots, layout="constrained")
    drawn = list(figure.subplots(1, number, squeeze=False, sharey=True)[0])
    names = ((WHOLE, "kept whole"), (IN_PART, "kept in part"), (LEFT_OUT, "left out"))
    handles = [Patch(facecolor=colour, edgecolor="#999999", label=name) for colour, name in names]
    figure.legend(handles=handles, loc="outside lower center", ncols=3, frameon=False, fontsize=10)
    return drawn


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
