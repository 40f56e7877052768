"""Measures what gamma keeps of even, mixed and concentrated heads: ``python -m bench.fidelity.even_heads --out PICTURE.png``.

Prints shares of the rows' attention, mean over all rows, by kind of head and method; without ``--out`` no picture. Runs on a CPU.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from flexmask import flexprefill_mask, hybrid_mask

BLOCK, HEAD_DIM = 128, 16
GAMMAS = (0.5, 0.7, 0.8, 0.85, 0.9, 0.93, 0.95, 0.98)
# share of a row's attention that goes to key block 3, in the last rows; the rest is even
KINDS = {"even": 0.0, "mixed": 0.4, "concentrated": 0.95}
METHODS = ("hybrid", "hybrid, no floor", "flexprefill")


class Point(NamedTuple):
    kind: str
    method: str
    gamma: float
    density: float
    held: float  # share of the rows' attention


def weights(share: float, number: int) -> Tensor:
    """The share that every row gives to each of its key blocks, up to a factor, (number,) float64."""
    found = torch.ones(number, dtype=torch.float64)
    if share:
        found[3] = share / (1 - share) * (number - 1)
    return found


def points(tokens: int) -> list[Point]:
    number, found = tokens // BLOCK, []
    query = torch.zeros(1, len(GAMMAS), tokens, HEAD_DIM)
    query[..., 0] = math.sqrt(HEAD_DIM)
    for kind, share in KINDS.items():
        own = weights(share, number)
        key = torch.zeros(1, 1, tokens, HEAD_DIM)
        key[..., 0] = own.log().float().repeat_interleave(BLOCK)
        attention = torch.where(torch.ones(number, number).tril().bool(), own, 0.0)
        attention /= attention.sum(1, keepdim=True)
        masks = (
            hybrid_mask(query, key, GAMMAS),
            hybrid_mask(query, key, GAMMAS, min_coverage=0.0),
            flexprefill_mask(query, key, GAMMAS, min_budget=256),
        )
        for method, mask in zip(METHODS, masks, strict=True):
            keep = mask.to_dense()[0].double().tril()
            densities, held = keep.sum((1, 2)) / (number * (number + 1) / 2), (keep * attention).sum(2).mean(1)
            pairs = zip(GAMMAS, densities.tolist(), held.tolist(), strict=True)
            found += [Point(kind, method, *each) for each in pairs]
    return found


def table(found: Sequence[Point]) -> list[str]:
    """Markdown: share of the rows' attention kept, and blocks kept in brackets."""
    lines = [f"| head | method | {' | '.join(f'{gamma:g}' for gamma in GAMMAS)} |", "|---|---|" + "---|" * len(GAMMAS)]
    for kind in KINDS:
        for method in METHODS:
            own = [each for each in found if (each.kind, each.method) == (kind, method)]
            lines.append(f"| {kind} | {method} | {' | '.join(f'{p.held:.0%} ({p.density:.0%})' for p in own)} |")
    return lines


def draw(found: Sequence[Point], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    for kind, marker in zip(KINDS, "osv", strict=True):
        for method, style in zip(METHODS, ("-", ":", "--"), strict=True):
            own = [each for each in found if (each.kind, each.method) == (kind, method)]
            gammas, held = [each.gamma for each in own], [each.held for each in own]
            axes.plot(gammas, held, linestyle=style, marker=marker, label=f"{kind}, {method}")
    axes.set(xlabel="gamma", ylabel="share of the rows' attention kept", ylim=(0, 1.03))
    axes.legend(fontsize="small", ncols=2)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=32768, help="a multiple of 128, at least 1,024 (32,768)")
    parser.add_argument("--out", type=Path, help="picture")
    options = parser.parse_args(arguments)
    found = points(options.tokens)
    print("\n".join(table(found)))
    if options.out is not None:
        draw(found, options.out)


if __name__ == "__main__":
    main()
