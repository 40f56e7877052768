"""Density from which SDPA beats FlexAttention's kernel on a CPU: ``python -m bench.cpu_break_even``.

The mask is made by then, so that the kernels alone are compared: SDPA's causal one, of every block, and FlexAttention's over a
random share of the blocks. They take turns. Between two densities the break-even is interpolated. `flexmask.flex.dense_heads` has
the figures that were taken over.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from itertools import pairwise

import torch

from bench.measure.clock import Method, interleaved
from bench.measure.random_blocks import random_blocks_mask
from bench.reporting.tables import text_table
from flexmask.base.inputs import attention_inputs
from flexmask.flex.dense import dense_attention
from flexmask.flex.run import run_flex_attention

DENSITIES = (0.3, 0.5, 0.6, 0.7, 0.8, 1.0)
HEADS = (4, 1)  # of one key group, which is what runs by one kernel or the other


def break_even(densities: Sequence[float], ratios: Sequence[float]) -> float | None:
    """Density at which the ratio of FlexAttention's time to SDPA's crosses 1, or None where it does not."""
    points = list(zip(densities, ratios, strict=True))
    for (low, below), (high, above) in pairwise(points):
        if below <= 1 < above:
            return low + (high - low) * (1 - below) / (above - below)
    return None


@torch.no_grad()
def measured(tokens: int, head_dim: int, dtype: torch.dtype, rounds: int) -> list[str]:
    """One row of the table: milliseconds of SDPA, the ratio to it by density, and the break-even."""
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(1, heads, tokens, head_dim, generator=generator).to(dtype) for heads in (*HEADS, HEADS[1]))
    inputs = attention_inputs(query, key, value)
    masks = {density: random_blocks_mask(query, key, density=density) for density in DENSITIES}
    visible = (tokens // 128) * (tokens // 128 + 1) / 2 * HEADS[0]

    def sparse(density: float) -> Method:
        return lambda: run_flex_attention(inputs, masks[density], "cpu")

    methods: dict[float, Method] = {0.0: lambda: dense_attention(inputs), **{density: sparse(density) for density in DENSITIES}}
    taken = interleaved(methods, rounds)
    errors = [value for value in taken.values() if isinstance(value, str)]
    if errors:
        raise RuntimeError(errors[0])
    dense = float(taken[0.0])
    ratios = [float(taken[density]) / dense for density in DENSITIES]
    kept = []
    for mask in masks.values():
        assert mask.full_kv_num_blocks is not None
        kept.append(float((mask.kv_num_blocks + mask.full_kv_num_blocks).sum() / visible))
    even = break_even(kept, ratios)
    name = f"{tokens:,} tokens, head_dim {head_dim}, {str(dtype).removeprefix('torch.')}"
    return [name, f"{dense:.0f} ms", *(f"{ratio:.2f}" for ratio in ratios), "none" if even is None else f"{even:.2f}"]


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure every length, head_dim and dtype, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[8192, 16384], help="tokens, whole blocks of 128")
    parser.add_argument("--head-dims", type=int, nargs="+", default=[64, 128])
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--rounds", type=int, default=5, help="rounds in which the methods take turns; medians are shown")
    options = parser.parse_args(arguments)
    print(f"FlexAttention's time to SDPA's by density, on {torch.get_num_threads()} CPU threads, torch {torch.__version__}\n")
    rows = [["", "SDPA", *map(str, DENSITIES), "break-even"]]
    for dtype in options.dtypes:
        for head_dim in options.head_dims:
            rows += [measured(tokens, head_dim, getattr(torch, dtype), options.rounds) for tokens in options.lengths]
    print(text_table([tuple(row) for row in rows], "<" + ">" * (len(DENSITIES) + 2)))


if __name__ == "__main__":
    main()
