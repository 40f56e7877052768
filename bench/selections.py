"""Masks and calls of each selection next to dense attention, on one prompt a length: ``python -m bench.selections --out FILE``.

A prompt's density depends on gamma and on the selection, so each length has a row of densities first; then times of dense cuDNN
attention, of the masks and of whole calls, eager and as CUDA graphs, and each mask's GPU time by kernel. With ``--gallery``, the
gallery's other masks instead, with their defaults, and the attention kernel alone over random blocks, by density. Which densities
lose equally much is the business of `bench.fidelity`.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.nn.attention import SDPBackend

from bench import ON_GPU
from bench.measure.clock import eager_and_graph_times, eager_times, text_of
from bench.measure.methods import BACKENDS, dense_sdpa, kernel
from bench.measure.random_blocks import random_blocks_mask
from bench.measure.stages import kernels_of
from bench.prompts.prompt import SHAPE, named_density
from bench.prompts.structured import structured_prompt
from flexmask import flexprefill_attention, flexprefill_mask, sparse_attention
from flexmask.block_masks import MASKS

GAMMAS = {"coverage": (0.7, 0.8, 0.9, 0.95), "hybrid": (0.7, 0.8, 0.9, 0.95, 0.97), "reference": (0.9, 0.95)}
CALLS = (("coverage", 0.7), ("coverage", 0.9), ("hybrid", 0.7), ("hybrid", 0.9), ("hybrid", 0.95), ("reference", 0.9))
KERNEL_DENSITIES = (0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5)
# quadratic, for measuring only, and one that is timed as selections
NOT_TIMED = ("oracle", "flexprefill")
# the nearest to ours come first, in case that the time runs out
FIRST = ("xattention", "flash_prefill", "streaming_llm", "minference", "vertical_slash")


def rows(tokens: int) -> Iterator[dict[str, Any]]:
    """Densities, times and kernels on one prompt, as they come."""
    tensors = structured_prompt(tokens, named_density(tokens), **SHAPE)
    query, key, value = tensors
    dense = dense_sdpa(tensors, SDPBackend.CUDNN_ATTENTION if ON_GPU else None)

    densities: dict[str, float | str] = {}
    for selection, gammas in GAMMAS.items():
        for gamma in gammas:
            try:
                found = flexprefill_mask(query, key, gamma, selection=selection, return_stats=True)
            except ValueError as error:  # more memory than a mask may take, or a length that the published code pads
                densities[f"{selection} {gamma}"] = text_of(error)
                continue
            assert isinstance(found, tuple)
            densities[f"{selection} {gamma}"] = round(float(found[1].density.mean()), 4)
    masks: dict[str, Callable[[], Any]] = {
        f"mask {selection} 0.9": functools.partial(flexprefill_mask, query, key, 0.9, selection=selection) for selection in GAMMAS
    }
    calls: dict[str, Callable[[], Any]] = {
        f"call {selection} {gamma}": functools.partial(
            flexprefill_attention, query, key, value, gamma, selection=selection, dense_below=0
        )
        for selection, gamma in CALLS
    }
    yield {"tokens": tokens, "densities": densities}
    for methods in (masks, calls):
        with torch.no_grad():
            times = eager_and_graph_times({"dense": dense, **methods})
        yield {"tokens": tokens, "times": times}
    for name, mask in masks.items() if ON_GPU else ():
        if "reference" in name:
            continue
        kernels_of(mask)  # the first profile includes setting up the profiler
        by_kernel: dict[str, float] = {}
        for launched, microseconds in kernels_of(mask):
            by_kernel[launched[:48]] = round(by_kernel.get(launched[:48], 0.0) + microseconds, 1)
        yield {"tokens": tokens, "kernels_us": by_kernel, "method": name}


def gallery_rows(tokens: int) -> Iterator[dict[str, Any]]:
    """Densities and times of the gallery's masks on one prompt, as they come; a mask that fails leaves its error."""
    tensors = structured_prompt(tokens, named_density(tokens), **SHAPE)
    query, key, value = tensors
    dense = dense_sdpa(tensors, SDPBackend.CUDNN_ATTENTION if ON_GPU else None)
    row: dict[str, Any]
    for name in dict.fromkeys((*FIRST, *MASKS)):
        if name in NOT_TIMED:
            continue
        mask = MASKS[name]
        methods: dict[str, Callable[[], Any]] = {
            f"mask {name}": functools.partial(mask, query, key),
            f"call {name}": functools.partial(sparse_attention, query, key, value, method=name, dense_below=0),
        }
        try:
            with torch.no_grad():
                density = 1 - float(mask(query, key).sparsity()) / 100
                # of the visible half of all blocks
                blocks = -(-tokens // 128)
                density *= 2 * blocks / (blocks + 1)
                times = eager_and_graph_times({"dense": dense, **methods})
            row = {"density": round(density, 4), "times": times}
        except Exception as error:  # one mask that fails must not end the run
            row = {"error": repr(error)[:500]}
        yield {"tokens": tokens, "method": name, **row}


def kernel_row(tokens: int) -> dict[str, Any]:
    """Times of the attention kernel alone over random blocks, by density."""
    tensors = structured_prompt(tokens, named_density(tokens), **SHAPE)
    with torch.no_grad():
        masks = {kept: random_blocks_mask(*tensors[:2], density=kept) for kept in KERNEL_DENSITIES}
        times = eager_times({kept: kernel(tensors, mask, BACKENDS[-1]) for kept, mask in masks.items()})
    blocks = -(-tokens // 128)
    kept = [2 * blocks / (blocks + 1) * (1 - float(mask.sparsity()) / 100) for mask in masks.values()]
    return {"tokens": tokens, "kernel": [[round(share, 4), row] for share, row in zip(kept, times.values(), strict=True)]}


def main(arguments: list[str] | None = None) -> None:
    """Measure every length, a JSON line a row, as they come."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lengths", type=lambda text: [int(x) for x in text.split(",")], default=[8192, 32768, 131072])
    parser.add_argument("--out", type=Path, default=None, help="a file for the rows, besides the output")
    parser.add_argument("--gallery", action="store_true", help="the gallery's other masks")
    given = parser.parse_args(arguments)
    measure = [lambda tokens: iter([kernel_row(tokens)]), gallery_rows] if given.gallery else [rows]
    for each, tokens in itertools.product(measure, given.lengths):
        for row in each(tokens):
            print(json.dumps(row), flush=True)
            if given.out is not None:
                with given.out.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
