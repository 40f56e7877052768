"""Whole calls at equal output error: ``python -m bench.speed.equal_error``, on a GPU.

On the structured workload. The error is ``||o - o_dense|| / ||o_dense||``, mean over heads. FlexPrefill at gamma 0.9 sets it;
hybrid runs at the lowest gamma whose error is at most that. Dense kernels, masks and calls take turns.
"""

from __future__ import annotations

import argparse
import itertools
import math
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F

from bench.prompts.structured import Tensors
from bench.speed import calls, clock
from bench.speed.run import Run, sheet_of
from flexmask import sparse_attention

GAMMA = 0.9
_HALVINGS = 10


def output_error(tensors: Tensors, dense: torch.Tensor, method: str, gamma: float) -> float:
    """Relative error of a head's output, mean over heads."""
    out = sparse_attention(*tensors, method=method, gamma=gamma, dense_below=0)
    per_head = [float((a.float() - b.float()).norm() / b.float().norm()) for a, b in zip(out[0], dense[0], strict=True)]
    return sum(per_head) / len(per_head)


def gamma_of_error(tensors: Tensors, dense: torch.Tensor, error: float) -> float:
    """Hybrid's lowest gamma, by bisection, whose error is at most `error`."""
    low, high = 0.3, 0.99
    if output_error(tensors, dense, "hybrid", high) > error:
        raise RuntimeError(f"hybrid's error at gamma {high} exceeds {error:.3f}")
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (low, middle) if output_error(tensors, dense, "hybrid", middle) <= error else (middle, high)
    return high


@torch.no_grad()
def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="CSV file; none: bench/results/speed-<device>.csv")
    parser.add_argument("--lengths", default="32768,131072", help="tokens, separated by commas")
    options = parser.parse_args(arguments)
    run = Run("equal error", sheet_of(options.out), minutes=math.inf)
    for tokens in map(int, options.lengths.split(",")):
        tensors = run.tensors("structured", tokens)
        dense = F.scaled_dot_product_attention(*tensors, is_causal=True, enable_gqa=True)
        wanted = output_error(tensors, dense, "flexprefill", GAMMA)
        gammas = {"flexprefill": GAMMA, "hybrid": gamma_of_error(tensors, dense, wanted)}
        errors = {method: output_error(tensors, dense, method, gamma) for method, gamma in gammas.items()}
        del dense
        named = calls.dense_calls(tensors)
        timed = dict(named)
        for method, gamma in gammas.items():
            timed[f"mask {method}"] = calls.mask(tensors, method, {"gamma": gamma})
            timed[f"call {method}"] = calls.call(tensors, method, {"gamma": gamma})
        for measure, found in (("eager_ms", clock.in_turns(timed)), ("graph_ms", clock.graphs_in_turns(timed))):
            times = {key: value for key, value in found.items() if isinstance(value, float)}
            if not times:
                continue  # no graphs without a GPU
            fastest = min((key for key in times if key in named), key=lambda key: times[key])
            reference = {"fastest": fastest, "fastest_value": times[fastest]}
            for (method, gamma), what in itertools.product(gammas.items(), ("mask", "call")):
                row = {"input": "structured", "tokens": tokens, "what": what, "method": method, "backend": calls.BACKENDS[0]}
                chosen = {"gamma": gamma, "error": round(errors[method], 4)}
                kept = calls.density(tensors, method, {"gamma": gamma})
                run.add(row, {measure: found[f"{what} {method}"]}, options=chosen, density=kept, **reference)
            print(tokens, measure, {key: times[key] for key in named if key in times}, flush=True)
        clock.free()


if __name__ == "__main__":
    main()
