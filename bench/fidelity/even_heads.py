"""Measures what gamma keeps of even, mixed and concentrated heads: ``python -m bench.fidelity.even_heads``, on a CPU.

Prints shares of the rows' attention, mean over all rows, by kind of head and method.
"""

from __future__ import annotations

import argparse
import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from bench.tables import markdown_table
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
    cells = []
    for kind, method in itertools.product(KINDS, METHODS):
        own = [each for each in found if (each.kind, each.method) == (kind, method)]
        cells.append([kind, method, *(f"{each.held:.0%} ({each.density:.0%})" for each in own)])
    return markdown_table(["head", "method", *(f"{gamma:g}" for gamma in GAMMAS)], cells)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=32768, help="a multiple of 128, at least 1,024 (32,768)")
    print("\n".join(table(points(parser.parse_args(arguments).tokens))))


if __name__ == "__main__":
    main()
