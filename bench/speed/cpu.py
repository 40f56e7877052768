"""FlexAttention's time relative to SDPA's by density on a CPU: ``python -m bench.speed.cpu``.

It stands behind a constant of `flexmask.dense_policy`.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Sequence

import numpy as np
import torch

from bench.speed.calls import density, kernel
from bench.speed.clock import Call, in_turns
from bench.tables import text_table
from flexmask.base.inputs import attention_inputs
from flexmask.flex.dense import dense_attention

DENSITIES = (0.3, 0.5, 0.6, 0.7, 0.8, 1.0)


def break_even(tokens: int, head_dim: int, dtype: torch.dtype, rounds: int) -> list[str]:
    """Row of SDPA's milliseconds, ratios by density, and the break-even."""
    query, key, value = (torch.randn(1, heads, tokens, head_dim).to(dtype) for heads in (4, 1, 1))
    inputs = attention_inputs(query, key, value)
    made: dict[float, Call] = {0.0: lambda: dense_attention(inputs)}
    made |= {each: kernel((query, key, value), "random_blocks", {"density": each}, "cpu") for each in DENSITIES}
    taken = {each: float(value) for each, value in in_turns(made, rounds).items()}
    ratios = [taken[each] / taken[0.0] for each in DENSITIES]
    kept = [density((query, key, value), "random_blocks", {"density": each}) for each in DENSITIES]
    even = np.interp(1, np.maximum.accumulate(ratios), kept) if ratios[0] <= 1 < ratios[-1] else None
    name = f"{tokens:,} tokens, head_dim {head_dim}, {str(dtype).removeprefix('torch.')}"
    return [name, f"{taken[0.0]:.0f} ms", *(f"{ratio:.2f}" for ratio in ratios), "none" if even is None else f"{even:.2f}"]


@torch.no_grad()
def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[8192, 16384], help="tokens, whole blocks")
    parser.add_argument("--head-dims", type=int, nargs="+", default=[64, 128])
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--rounds", type=int, default=5, help="in which the ways take turns; medians are shown")
    options = parser.parse_args(arguments)
    torch.manual_seed(0)
    print(f"On {torch.get_num_threads()} CPU threads, torch {torch.__version__}\n")
    cases = itertools.product((getattr(torch, name) for name in options.dtypes), options.head_dims)
    rows = [["FlexAttention / SDPA by density", "SDPA", *map(str, DENSITIES), "break-even"]]
    rows += [break_even(tokens, dim, dtype, options.rounds) for dtype, dim in cases for tokens in options.lengths]
    print(text_table(rows, "<" + ">" * (len(rows[0]) - 1)))


if __name__ == "__main__":
    main()
