"""Masks and calls of each selection next to dense attention: ``python -m bench.selections --out FILE``.

On one prompt a length, in turns with dense cuDNN attention: the masks, and whole calls at the densities at which the selections
lose equally much on the texts of `bench.fidelity` (gamma is searched until the mask keeps that share of the blocks). Plain calls
come first, since other work on the machine's CPUs spoils them; then CUDA graphs, each mask's GPU time by kernel, blocks of 64
tokens, and the attention kernel alone over random blocks, by density. With ``--gallery``, the gallery's other masks with their
defaults instead.

Each row is written as it is measured, and the same command goes on where an earlier one stopped: rows of the same code, torch and
device are not measured again.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.nn.attention import SDPBackend

from bench import ON_GPU
from bench.measure.clock import DeviceLostError, eager_and_graph_times, eager_times, free, graph_times, text_of
from bench.measure.memory import peak_bytes
from bench.measure.methods import BACKENDS, dense_sdpa, kernel
from bench.measure.random_blocks import random_blocks_mask
from bench.measure.results import device_name
from bench.measure.rows import Row, RowLog, code_digest
from bench.measure.selected import Selected, density_of
from bench.measure.stages import kernels_of
from bench.prompts.prompt import SHAPE, named_density
from bench.prompts.structured import Tensors, structured_prompt
from flexmask import sparse_attention
from flexmask.block_masks import MASKS

GAMMA = 0.9
# densities of whole calls, around those with an abs d of .3 and .2 on the texts of FIDELITY.md
EQUAL = {"hybrid": (0.1, 0.15, 0.2), "coverage": (0.18, 0.24, 0.3), "reference": (0.26, 0.36, 0.46)}
OURS, PUBLISHED = ("hybrid", "coverage"), ("reference",)
KERNEL_DENSITIES = (0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5)
# quadratic, for measuring only, and one that is timed as selections
NOT_TIMED = ("oracle", "flexprefill")
# the nearest to ours come first, in case that the time runs out
FIRST = ("xattention", "flash_prefill", "streaming_llm", "minference", "vertical_slash")
GALLERY = tuple(name for name in dict.fromkeys((*FIRST, *MASKS)) if name not in NOT_TIMED)
GALLERY_ROUNDS = 5 if ON_GPU else 1
# a call this far from the density that was wanted is left out
FAR = 0.02

Part = tuple[str, Callable[["Prompt"], Row]]
"""A row's name and what measures it"""


class Prompt:
    """The prompt of a length, its dense attention, and the selections' masks and calls on it."""

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens
        self.tensors: Tensors = structured_prompt(tokens, named_density(tokens), **SHAPE)
        self.dense = dense_sdpa(self.tensors, SDPBackend.CUDNN_ATTENTION if ON_GPU else None)
        self._selected: dict[tuple[str, int], Selected] = {}

    def selected(self, selection: str, block_size: int = 128) -> Selected:
        """A selection's masks and calls."""
        key = selection, block_size
        if key not in self._selected:
            self._selected[key] = Selected(self.tensors, selection, block_size)
        return self._selected[key]

    def masks(self, selections: Sequence[str]) -> dict[str, Callable[[], Any]]:
        """Masks at gamma 0.9."""
        return {f"mask {name} {GAMMA}": functools.partial(self.selected(name).masks, GAMMA) for name in selections}


def masks(prompt: Prompt, selections: Sequence[str], times: Callable[..., Any]) -> Row:
    """Times of the masks."""
    made = prompt.masks(selections)
    densities = {f"{name} {GAMMA}": round(prompt.selected(name).density(GAMMA), 4) for name in selections}
    return {"densities": densities, "times": times({"dense": prompt.dense, **made})}


def calls(
    prompt: Prompt, selections: Sequence[str], times: Callable[..., Any], backend: str, block_sizes: Sequence[int] = (128,)
) -> Row:
    """Times of whole calls at the densities of `EQUAL`; where a short prompt's floor keeps more, of one call at the floor."""
    made: dict[str, Callable[[], Any]] = {}
    found: dict[str, Row] = {}
    for name, size in itertools.product(selections, block_sizes):
        selected = prompt.selected(name, size)
        gammas = {wanted: selected.gamma_for(wanted) for wanted in EQUAL[name]}
        near = [wanted for wanted, (_, density) in gammas.items() if abs(density - wanted) <= FAR]
        for wanted in near or EQUAL[name][:1]:
            gamma, density = gammas[wanted]
            title = f"call {name} {wanted}" + ("" if size == 128 else f" blocks of {size}")
            made[title] = selected.call(gamma, backend)
            found[title] = {"selection": name, "block_size": size, "gamma": round(gamma, 6), "density": round(density, 4)}
    return {"backend": backend, "calls": found, "times": times({"dense": prompt.dense, **made})}


def kernels(prompt: Prompt, selection: str) -> Row:
    """Microseconds on the GPU of each kernel of a mask."""
    mask = functools.partial(prompt.selected(selection).masks, GAMMA)
    mask()
    if ON_GPU:
        kernels_of(mask)  # the first profile includes setting up the profiler
    by_kernel: dict[str, float] = {}
    for launched, microseconds in kernels_of(mask) if ON_GPU else ():
        by_kernel[launched[:48]] = round(by_kernel.get(launched[:48], 0.0) + microseconds, 1)
    return {"method": f"mask {selection} {GAMMA}", "kernels_us": by_kernel}


def kernel_by_density(prompt: Prompt, backend: str, block_size: int) -> Row:
    """Times of the attention kernel alone over random blocks, by density."""
    made = {kept: random_blocks_mask(*prompt.tensors[:2], density=kept, block_size=block_size) for kept in KERNEL_DENSITIES}
    densities = [round(density_of([mask]), 4) for mask in made.values()]
    times = eager_times({kept: kernel(prompt.tensors, mask, backend) for kept, mask in made.items()})
    return {"backend": backend, "block_size": block_size, "kernel": list(zip(densities, times.values(), strict=True))}


def gallery_mask(prompt: Prompt, name: str, with_call: bool) -> Row:
    """Density and times of a mask of the gallery and, if asked, of the whole call; else the memory that the mask takes."""
    query, key, value = prompt.tensors
    mask = functools.partial(MASKS[name], query, key)
    made: dict[str, Callable[[], Any]] = {f"mask {name}": mask}
    row: Row = {"method": name, "density": round(density_of([mask()]), 4)}
    if with_call:
        made[f"call {name}"] = functools.partial(sparse_attention, query, key, value, method=name, dense_below=0)
    elif ON_GPU:
        row["peak_mb"] = round(peak_bytes(mask)[0] / 2**20, 1)
    return row | {"times": eager_and_graph_times({"dense": prompt.dense, **made}, GALLERY_ROUNDS)}


def parts() -> Iterator[Part]:
    """What is measured of the selections, most wanted first: plain calls before anything else."""
    auto, triton = BACKENDS[0], BACKENDS[-1]
    for names, title in ((OURS, "ours"), (PUBLISHED, "published")):
        yield f"masks {title} plain", functools.partial(masks, selections=names, times=eager_times)
        yield f"calls {title} plain", functools.partial(calls, selections=names, times=eager_times, backend=auto)
    yield "masks ours graph", functools.partial(masks, selections=OURS, times=graph_times)
    yield "calls ours graph", functools.partial(calls, selections=OURS, times=graph_times, backend=auto)
    # blocks of 64 run on Triton's kernel alone
    sizes = functools.partial(calls, selections=("hybrid",), times=eager_times, backend=triton, block_sizes=(128, 64))
    yield "calls blocks", sizes
    for size in (64, 128):
        yield f"kernel {triton} {size}", functools.partial(kernel_by_density, backend=triton, block_size=size)
    if auto != triton:
        yield f"kernel {auto} 128", functools.partial(kernel_by_density, backend=auto, block_size=128)
        coverage = functools.partial(calls, selections=("coverage",), times=eager_times, backend=triton)
        yield "calls coverage triton", coverage
    for name in OURS:
        yield f"kernels {name}", functools.partial(kernels, selection=name)
    yield "masks published graph", functools.partial(masks, selections=PUBLISHED, times=graph_times)


def gallery_parts() -> Iterator[Part]:
    """The gallery's masks, and then whole calls."""
    for with_call in (False, True):
        for name in GALLERY:
            yield f"{'call' if with_call else 'mask'} {name}", functools.partial(gallery_mask, name=name, with_call=with_call)


def run(log: RowLog, chosen: Sequence[Part], lengths: Sequence[int], stop: float) -> None:
    """Measure the rows that the log lacks; one that fails leaves its error."""
    same = {"code": code_digest(), "torch": torch.__version__, "device": device_name()}
    prompt_of = functools.cache(Prompt)
    for part, measure in chosen:
        for tokens in lengths:
            row: Row = {"tokens": tokens, "part": part, **same}
            if log.has(**row):
                continue
            if time.perf_counter() > stop:
                print("out of time before", part, tokens, flush=True)
                return
            start = time.perf_counter()
            lost: DeviceLostError | None = None
            try:
                with torch.no_grad():
                    row |= measure(prompt_of(tokens))
            except Exception as error:  # one part that fails must not end the run
                try:
                    row["error"] = text_of(error)
                except DeviceLostError as gone:
                    row["error"], lost = str(gone)[:500], gone
            log.add(**row, seconds=round(time.perf_counter() - start, 1))
            print(json.dumps(log.rows[-1]), flush=True)
            if lost is not None:
                raise lost
            free()


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure every part at every length."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=lambda text: [int(x) for x in text.split(",")], default=[32768, 131072, 8192])
    parser.add_argument("--out", type=Path, help="a file that rows are added to, besides the output")
    parser.add_argument("--gallery", action="store_true", help="the gallery's other masks")
    parser.add_argument("--minutes", type=float, default=60.0, help="begin no row after that (60)")
    given = parser.parse_args(arguments)
    log = RowLog(given.out, ("tokens", "part", "code", "torch", "device"))
    run(log, list(gallery_parts() if given.gallery else parts()), given.lengths, time.perf_counter() + 60 * given.minutes)


if __name__ == "__main__":
    main()
