"""Draw the pictures of docs/concepts.md from `bench.concepts.steps`: ``python -m bench.concepts.draw``."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench.concepts.steps import BLOCK_SIZE, GAMMA, TAU, Head, density, facts, heads

FOLDER = Path("docs/concepts")
_KEPT, _LEFT, _SECOND, _INK = "#1f5fa8", "#c9ccd3", "#f0a02f", "#444444"
_KINDS = ("#ffffff", "#e9e9ed", "#f0a02f", "#1f5fa8")  # hidden, left out, by the second source, kept
_SMALLEST = 1e-5  # attention below this is drawn white


def draw(folder: Path = FOLDER) -> list[Path]:
    """Draw every picture into `folder`; return their paths."""
    slash, aware = heads()
    folder.mkdir(parents=True, exist_ok=True)
    drawn = []
    for name, (columns, height, picture) in PICTURES.items():
        drawn.append(_save(folder / f"{name}.png", columns, height, picture, slash, aware))
    return drawn


def _save(path: Path, columns: int, height: float, picture: Callable[..., None], slash: Head, aware: Head) -> Path:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, height), dpi=150, layout="constrained")
    axes = figure.subplots(1, columns, squeeze=False)[0]
    picture(axes, slash, aware)
    figure.savefig(path, format="png")
    return path


def attention_maps(axes: Sequence[Any], slash: Head, aware: Head) -> None:
    """True attention of both heads, the last block of rows marked."""
    from matplotlib.patches import Rectangle

    size = BLOCK_SIZE
    for axis, head, kind in zip(axes, (slash, aware), ("vertical-slash", "query-aware"), strict=True):
        image = _shade(axis, head.attention)
        _blocks_grid(axis, head.attention.shape[0])
        length = head.attention.shape[0]
        axis.add_patch(Rectangle((0, length - size), length, size, fill=False, edgecolor=_SECOND, linewidth=2))
        axis.set(title=f"{head.name}: {kind}", xlabel="key (tokens)", ylabel="query (tokens)")
    axes[-1].figure.colorbar(image, ax=list(axes), shrink=0.8, label="attention")


def line_mass(axes: Sequence[Any], slash: Head, aware: Head) -> None:
    """V and S of the vertical-slash head."""
    _bars(axes[0], slash.vertical, torch.ones_like(slash.kept_vertical))
    axes[0].set(title="V: mass by key block", xlabel="key block", ylabel="share of attention")
    _bars(axes[1], slash.slash, torch.ones_like(slash.kept_slash))
    axes[1].set(title="S: mass by block diagonal", xlabel="block diagonal (0: the query's own block)")


def distances(axes: Sequence[Any], slash: Head, aware: Head) -> None:
    """V and its estimate from block means."""
    for axis, head in zip(axes, (slash, aware), strict=True):
        _bars(axis, head.vertical, torch.zeros_like(head.kept_vertical), label="true: V")
        blocks = torch.arange(len(head.estimated) + 1) - 0.5
        axis.stairs(head.estimated.numpy(), blocks.numpy(), color=_KEPT, linewidth=1.8, label="estimated from block means")
        rule = f"< {TAU}: query-aware" if head.is_query_aware else f">= {TAU}: vertical-slash"
        axis.set_title(f"{head.name}: D = {head.distance:.3f} {rule}", fontsize=10)
        axis.set_xlabel("key block")
        axis.legend(frameon=False)
    axes[0].set_ylabel("share of attention")


def top_p(axes: Sequence[Any], slash: Head, aware: Head) -> None:
    """Lines of both families in descending order, cut by gamma."""
    families = (("key blocks", slash.vertical, slash.kept_vertical), ("block diagonals", slash.slash, slash.kept_slash))
    for axis, (family, mass, kept) in zip(axes, families, strict=True):
        ordered, order = mass.sort(descending=True, stable=True)
        share = mass.sum()
        _bars(axis, ordered / share, kept[order], label="kept")
        places = torch.arange(len(ordered))
        axis.plot(places.numpy(), (ordered.cumsum(0) / share).numpy(), color=_INK, marker=".", linewidth=1, label="running sum")
        axis.axhline(GAMMA, color=_SECOND, linewidth=1.8, label=f"gamma = {GAMMA}")
        axis.set_xticks(places[:12].tolist(), [str(int(block)) for block in order[:12]])
        axis.set(title=f"{int(kept.sum())} of {len(kept)} {family}", xlim=(-0.6, 11.6), xlabel=f"{family}, heaviest first")
        axis.legend(frameon=False, loc="center right")
    axes[0].set_ylabel("share of the family's mass")


def vertical_slash(axes: Sequence[Any], slash: Head, aware: Head) -> None:
    """Kept lines over the map, and the kept blocks."""
    _map(axes[0], slash.lines)
    axes[0].set_title(f"lines, extended\ndensity {density(slash.lines):.1%}")
    _map(axes[1], slash.keep, second=~slash.lines)
    axes[1].set_title(f"with first and diagonal blocks\ndensity {density(slash.keep):.1%}")
    image = _shade(axes[2], slash.pooled)
    axes[2].set_title("the pooled map,\nwhich this head does not follow")
    axes[2].figure.colorbar(image, ax=axes[2], shrink=0.6)


def query_aware(axes: Sequence[Any], slash: Head, aware: Head) -> None:
    """Pooled map of the query-aware head, its top-p, and the kept blocks."""
    image = _shade(axes[0], aware.pooled)
    axes[0].set_title("A: the pooled map\n")
    axes[0].figure.colorbar(image, ax=axes[0], shrink=0.6)
    _map(axes[1], aware.kept_pooled)
    axes[1].set_title(f"top-p of the whole map\ndensity {density(aware.kept_pooled):.1%}")
    _map(axes[2], aware.keep, second=~aware.kept_pooled)
    axes[2].set_title(f"with floor, first, diagonal\ndensity {density(aware.keep):.1%}")


def hybrid(axes: Sequence[Any], slash: Head, aware: Head) -> None:
    """Hybrid's two sources for the vertical-slash head, and the kept blocks."""
    image = _shade(axes[0], slash.evidence)
    axes[0].set_title("R: own rows, key means\n")
    axes[0].figure.colorbar(image, ax=axes[0], shrink=0.6)
    _map(axes[1], slash.kept_rows)
    axes[1].set_title(f"R >= {slash.threshold:.2f}\ndensity {density(slash.kept_rows):.1%}")
    _map(axes[2], slash.hybrid_keep, second=~slash.kept_rows)
    axes[2].set_title(f"with the last rows' lines\ndensity {density(slash.hybrid_keep):.1%}")


# name of the file: columns, height in inches, what draws it
PICTURES: dict[str, tuple[int, float, Callable[..., None]]] = {
    "1-attention": (2, 4.3, attention_maps),
    "2-line-mass": (2, 2.8, line_mass),
    "3-distance": (2, 2.9, distances),
    "4-top-p": (2, 3.0, top_p),
    "5-vertical-slash": (3, 3.4, vertical_slash),
    "6-query-aware": (3, 3.4, query_aware),
    "7-hybrid": (3, 3.4, hybrid),
}


def _bars(axis: Any, values: Tensor, kept: Tensor, label: str | None = None) -> None:
    colours = [_KEPT if keep else _LEFT for keep in kept.tolist()]
    axis.bar(range(len(values)), values.tolist(), color=colours, width=0.85, label=label)
    axis.spines[["top", "right"]].set_visible(False)


def _map(axis: Any, keep: Tensor, second: Tensor | None = None) -> None:
    """Kept blocks, those of `second` in another colour."""
    from matplotlib.colors import ListedColormap

    kinds = torch.ones_like(keep, dtype=torch.long).tril()
    kinds[keep] = 3
    if second is not None:
        kinds[keep & second] = 2
    axis.imshow(kinds.numpy(), cmap=ListedColormap(_KINDS), vmin=0, vmax=3, interpolation="nearest")
    _block_labels(axis)


def _shade(axis: Any, attention: Tensor) -> Any:
    """Attention on a logarithmic scale."""
    from matplotlib.colors import LogNorm

    shown = attention.clamp(min=_SMALLEST).numpy()
    image = axis.imshow(shown, cmap="Greys", norm=LogNorm(_SMALLEST, 1), interpolation="nearest")
    if len(attention) <= 64:
        _block_labels(axis)
    return image


def _blocks_grid(axis: Any, length: int) -> None:
    edges = [edge - 0.5 for edge in range(0, length + 1, BLOCK_SIZE)]
    axis.vlines(edges, -0.5, length - 0.5, color="#8aa0c0", linewidth=0.25)
    axis.hlines(edges, -0.5, length - 0.5, color="#8aa0c0", linewidth=0.25)
    axis.set(xlim=(-0.5, length - 0.5), ylim=(length - 0.5, -0.5))


def _block_labels(axis: Any) -> None:
    axis.set(xlabel="key block", ylabel="query block")
    axis.title.set_fontsize(10)


def main(arguments: Sequence[str] | None = None) -> None:
    """Draw the pictures and print the figures of the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=FOLDER, help="folder to draw into")
    options = parser.parse_args(arguments)
    for path in draw(options.out):
        print(path)
    for name, value in facts().items():
        print(f"{name}: {value}")


if __name__ == "__main__":
    main()
