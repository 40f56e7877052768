"""Measure one part of the report: ``python -m bench.parts latency``, or ``make bench PART=latency``.

Each run stops by itself after 7.5 minutes; the same command resumes it. Rows go to ``bench/results/<device>.json``, from which
``make bench-report`` makes tables and pictures.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from bench import ON_GPU
from bench.measure import methods
from bench.measure.compare import compare, shape_fields
from bench.measure.compile_times import compile_fields
from bench.measure.memory import peak_bytes
from bench.measure.methods import BACKENDS
from bench.measure.results import FOLDER, Results, Row
from bench.measure.resumable import ResumableRun
from bench.measure.stages import stage_fields
from bench.measure.variants import (
    DENSE_BASELINE,
    Variant,
    call_variants,
    dense_variants,
    gallery_variants,
    kernel_variants,
    mask_variants,
)
from bench.prompts.prompt import DEFAULT_FLOOR, GAMMA, SHAPE, Prompt, floor_of, named_density

GAMMAS = (0.85, 0.9, 0.95)
# in the order of measurement: what the targets need comes first
LENGTHS: dict[str, tuple[int, ...]] = (
    {
        "latency": (8192, 32768, 131072, 16384, 65536),
        "breakeven": (8192, 16384, 32768, 4096, 12288, 24576, 65536, 131072),
        "stages": (8192, 32768, 131072),
        "memory": (8192, 32768, 131072, 524288),
        "compile": (1024, 131072),
        "long": (524288, 1048576),
    }
    if ON_GPU
    else {"latency": (4096, 8192), "breakeven": (4096, 8192), "compile": (1024, 2048)}
)
_AIMS = (0.05, 0.15, 0.3, 0.5, 0.75)
_BREAK_EVEN_GAMMA = 0.95
# seconds one dense call of the long part may take
_DENSE_LIMIT = 60.0


def latency(run: ResumableRun, lengths: Sequence[int]) -> None:
    """Measure every method at every length."""
    for tokens in lengths:
        floor = floor_of(tokens)
        prompt = Prompt("mixture", tokens, floor, named_density(tokens))
        compare(run, prompt, [*mask_variants((GAMMA,), floor), *call_variants(BACKENDS[0], GAMMAS, floor)])
        compare(run, prompt, [*dense_variants(), *kernel_variants(floor)])
        compare(run, prompt, mask_variants(sorted({*GAMMAS} - {GAMMA}), floor))
        for backend in BACKENDS[1:]:
            compare(run, prompt, call_variants(backend, GAMMAS, floor))
        for pair in gallery_variants():
            compare(run, prompt, pair)
        if floor != DEFAULT_FLOOR:
            compare(run, prompt, _mask_and_call(DEFAULT_FLOOR))
        if tokens == 131072:
            compare(run, Prompt("mixture", tokens, floor, 0.1), kernel_variants(floor))
        if tokens == 16384 and not ON_GPU:
            compare(run, Prompt("mixture", tokens, floor, 0.15), _mask_and_call(floor))
        if tokens in (32768, 131072) or not ON_GPU:
            compare(run, Prompt("topics", tokens, floor, named_density(tokens)), _mask_and_call(floor))


def breakeven(run: ResumableRun, lengths: Sequence[int]) -> None:
    """Measure the whole call against dense attention at the default floor, over densities and on captured inputs."""
    group = call_variants(BACKENDS[0], (_BREAK_EVEN_GAMMA,), DEFAULT_FLOOR)
    for tokens in lengths:
        for aim in _AIMS:
            compare(run, Prompt("mixture", tokens, DEFAULT_FLOOR, aim=aim), group)
    for tokens in lengths:
        compare(run, Prompt("retriever", tokens, DEFAULT_FLOOR), group)
        compare(run, Prompt("retriever, layers 1 and 2", tokens, DEFAULT_FLOOR), group)


def stages(run: ResumableRun, lengths: Sequence[int]) -> None:
    """Measure GPU kernel time by stage, of the mask and of the whole call."""
    for tokens in lengths:
        for input in ("mixture", "topics"):
            floor = floor_of(tokens)
            prompt = Prompt(input, tokens, floor, named_density(tokens))
            for variant in _mask_and_call(floor):
                _measure_stages(run, prompt, variant)


def _measure_stages(run: ResumableRun, prompt: Prompt, variant: Variant) -> None:
    def work(missing: list[Row]) -> None:
        tensors = prompt.tensors(run.results)
        fields = variant.density(prompt, run.results)
        with torch.no_grad():
            methods.warm_up(variant.make, tensors)
            fields |= stage_fields(variant.make(tensors))
        run.add(missing[0] | shape_fields(tensors) | fields)

    run.step(f"{prompt.input}, {prompt.tokens:,} tokens, {variant.method}", [variant.key(prompt)], work)


def memory(run: ResumableRun, lengths: Sequence[int]) -> None:
    """Measure the peak memory of a call beyond query, key, value and output."""
    for tokens in lengths:
        floor = floor_of(tokens)
        prompt = Prompt("mixture", tokens, floor, named_density(tokens))
        calls = [variant for backend in BACKENDS for variant in call_variants(backend, (GAMMA,), floor)]
        for variant in [*calls, *mask_variants((GAMMA,), floor), DENSE_BASELINE]:
            _measure_memory(run, prompt, variant)


def _measure_memory(run: ResumableRun, prompt: Prompt, variant: Variant) -> None:
    def work(missing: list[Row]) -> None:
        tensors = prompt.tensors(run.results)
        fields = variant.density(prompt, run.results)
        with torch.no_grad():
            methods.warm_up(variant.make, tensors)
            method = variant.make(tensors)
            method()
            peak, result = peak_bytes(method)
        # a mask's own lists count as its cost; a call's output does not
        extra = peak if variant.method == "mask" else peak - result
        fields |= {"peak_mb": peak / 2**20, "result_mb": result / 2**20, "extra_mb": extra / 2**20}
        run.add(missing[0] | shape_fields(tensors) | fields)

    run.step(f"memory, {prompt.tokens:,} tokens, {variant.method}", [variant.key(prompt)], work)


def long(run: ResumableRun, lengths: Sequence[int]) -> None:
    """Measure very long prompts, eager only: mask, call, and dense attention if it is expected to end soon enough."""
    for tokens in lengths:
        floor = floor_of(tokens)
        prompt = Prompt("mixture", tokens, floor, named_density(tokens))
        # 200 TFLOP/s, a third of what cuDNN reaches on an H200
        seconds = 2 * SHAPE["num_heads"] * 128 * tokens**2 / 200e12
        if seconds > _DENSE_LIMIT:
            run.say(f"{tokens:,} tokens skipped: dense attention may take over {_DENSE_LIMIT:.0f} s")
            continue
        compare(run, prompt, [*_mask_and_call(floor), DENSE_BASELINE], rounds=3, graphs=False)
        for backend in BACKENDS[1:]:
            compare(run, prompt, call_variants(backend, (GAMMA,), floor), rounds=1, graphs=False)


def compilation(run: ResumableRun, lengths: Sequence[int]) -> None:
    """Measure first calls at forty lengths, and the gain of code compiled for one length."""
    for backend in BACKENDS:
        key = call_variants(backend, (GAMMA,), DEFAULT_FLOOR)[0].key(Prompt("mixture", lengths[-1], DEFAULT_FLOOR))

        def work(missing: list[Row], backend: str = backend) -> None:
            run.add(missing[0] | compile_fields(backend, lengths[0], lengths[-1], GAMMA, run.say))

        run.step(f"compile, {backend}", [key], work)


def _mask_and_call(floor: int) -> list[Variant]:
    return [*mask_variants((GAMMA,), floor), *call_variants(BACKENDS[0], (GAMMA,), floor)]


PARTS: dict[str, Callable[[ResumableRun, Sequence[int]], None]] = {
    "latency": latency,
    "breakeven": breakeven,
    "stages": stages,
    "memory": memory,
    "compile": compilation,
    "long": long,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a part; return the number of rows left for the next run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=tuple(PARTS))
    parser.add_argument("--again", action="store_true", help="also measure rows that exist, and replace them")
    parser.add_argument("--results", type=Path, default=FOLDER, help="folder of the results")
    parser.add_argument("--lengths", help="tokens, separated by commas; default: the part's own")
    parser.add_argument("--minutes", type=float, default=7.5, help="stop before this")
    options = parser.parse_args(arguments)
    if options.part not in LENGTHS:
        parser.error(f"{options.part} needs a CUDA device")
    lengths = LENGTHS[options.part]
    if options.lengths:
        lengths = tuple(int(word) for word in options.lengths.split(","))
    # advice from torch's compiler to its own users
    warnings.filterwarnings("ignore", category=UserWarning, module=r"torch\._inductor")
    results = Results(options.results, options.again)
    run = ResumableRun(options.part, results, options.minutes * 60)
    run.say(f"{options.part} on {results.device}, torch {torch.__version__}, into {results.path}")
    PARTS[options.part](run, lengths)
    run.say(f"{run.left} rows are left: run the same command again" if run.left else "complete")
    return run.left


if __name__ == "__main__":
    main()
