"""Pictures of block masks. Needs matplotlib, which is imported when something is drawn."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

_COLOURS = ("#ffffff", "#e9e9ed", "#f0a02f", "#1f5fa8")  # never seen, left out, kept in part, kept whole
_INCHES = 5.0  # side of one head's square


def plot_block_mask(
    block_mask: BlockMask | Sequence[BlockMask],
    heads: Sequence[int],
    path: str | Path,
    titles: Sequence[str] | None = None,
    *,
    batch: int = 0,
) -> Path:
    """Draw which blocks some heads keep, side by side, as a PNG.

    Blocks kept whole and blocks kept in part (their mask_mod still hides some pairs) differ in colour; grey blocks are those
    that only dense causal attention would compute. The line is causality, with the last query at the last key.

    Parameters
    ----------
    block_mask
        Of shape (batch, num_heads, q_len, kv_len), on any device. Read on the host, so it waits for the device. Or one mask per
        head, all of the same lengths and block size.
    heads
        Heads to draw, at least one, each in [0, num_heads).
    path
        File to write; its folder is made if need be.
    titles
        One line per head, to which the density is added. Default None: ``head 3``.
    batch
        Batch row. Default 0.

    Returns
    -------
    Path
        `path`.

    Raises
    ------
    ValueError
        For a head or batch row that the mask does not have, and for masks or titles that are not one per head.

    Examples
    --------
    >>> import tempfile
    >>> from torch.nn.attention.flex_attention import create_block_mask
    >>> mask = create_block_mask(lambda b, h, q, k: k <= q, 1, 2, 512, 512, device="cpu")
    >>> plot_block_mask(mask, [0, 1], tempfile.mkdtemp() + "/causal.png").name
    'causal.png'
    """
    from matplotlib.colors import ListedColormap
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    if not heads:
        raise ValueError("heads must name at least one head; got none")
    masks = [block_mask] * len(heads) if isinstance(block_mask, BlockMask) else list(block_mask)
    titles = [f"head {head}" for head in heads] if titles is None else titles
    for name, given in (("block_mask", masks), ("titles", titles)):
        if len(given) != len(heads):
            raise ValueError(f"{name} must be one per head ({len(heads)}); got {len(given)}")
    sizes = {(*mask.shape[-2:], *mask.BLOCK_SIZE) for mask in masks}
    if len(sizes) > 1:
        raise ValueError(f"block_mask must have one (q_len, kv_len, q_block, kv_block); got {sorted(sizes)}")
    kinds = [block_kinds(mask, head, batch) for mask, head in zip(masks, heads, strict=True)]

    q_len, kv_len, q_block, kv_block = sizes.pop()
    # one block is at least two dots wide, so that a lone one can be seen
    dots = max(110, 2 * max(kinds[0].shape) / (0.85 * _INCHES))
    figure = Figure(figsize=(_INCHES * len(kinds) + 0.4, _INCHES + 0.8), dpi=dots, layout="constrained")
    axes = figure.subplots(1, len(kinds), squeeze=False, sharey=True)[0]
    extent = (0, kinds[0].shape[1] * kv_block, kinds[0].shape[0] * q_block, 0)
    for axis, kind, title in zip(axes, kinds, titles, strict=True):
        axis.imshow(kind.numpy(), cmap=ListedColormap(_COLOURS), vmin=0, vmax=3, interpolation="nearest", extent=extent)
        axis.plot([kv_len - q_len, kv_len], [0, q_len], color="#444444", linewidth=0.4)
        density = (kind >= 2).sum() / (kind >= 1).sum()
        axis.set_title(f"{title}, density {density:.2f}", fontsize=11)
        axis.set_xlabel("key (tokens)")
        axis.set(xlim=(0, kv_len), ylim=(q_len, 0))
        axis.ticklabel_format(style="plain")
        axis.locator_params(nbins=5)
    axes[0].set_ylabel("query (tokens)")
    names = ("kept whole", "kept in part", "left out")
    patches = [
        Patch(facecolor=colour, edgecolor="#999999", label=name) for colour, name in zip(_COLOURS[:0:-1], names, strict=True)
    ]
    figure.legend(handles=patches, loc="outside lower center", ncols=3, frameon=False, fontsize=10)
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="png")
    return path


def block_kinds(block_mask: BlockMask, head: int, batch: int = 0) -> Tensor:
    """Classify every block of one head.

    Parameters
    ----------
    block_mask, head, batch
        As in `plot_block_mask`.

    Returns
    -------
    Tensor
        (num_q_blocks, num_kv_blocks) int64 on the CPU: 0 hidden by causality, 1 left out, 2 kept in part, 3 kept whole.

    Raises
    ------
    ValueError
        For a head or batch row that the mask does not have.
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
    """A (num_q_blocks, num_kv_blocks) bool map on the CPU of the first `counts` entries of each row of `indices`."""
    counts, indices = counts.cpu(), indices.cpu().long()
    rows, columns = torch.nonzero(torch.arange(indices.shape[-1], device="cpu") < counts[:, None], as_tuple=True)
    kept = torch.zeros_like(indices, dtype=torch.bool)
    kept[rows, indices[rows, columns]] = True
    return kept
