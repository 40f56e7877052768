"""The measured parts: ``python -m bench.parts latency``, or ``make bench PART=latency``.

Every part fits into eight minutes of a GPU, stops by itself before that, and goes on where it stopped when it is run again.
Results go to ``bench/results/<device>.json``; ``make bench-report`` makes tables and plots of them.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from bench import methods
from bench.comparing import Compared, calls, compare, dense_methods, kernels, masks, others, shape_fields
from bench.compiling import compile_rows
from bench.measure import peak_bytes
from bench.methods import BACKENDS, OTHER_MASKS
from bench.prompts import DEFAULT_FLOOR, GAMMA, ON_GPU, SHAPE, Prompt, floor_of, named_density
from bench.rows import FOLDER, Results, Row
from bench.run import Run
from bench.stages import stage_fields

GAMMAS = (0.85, 0.9, 0.95)
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
# seconds, of one dense call in the long part
_DENSE_LIMIT = 60.0


def latency(run: Run, lengths: Sequence[int]) -> None:
    """Every method at every length."""
    for tokens in lengths:
        floor = floor_of(tokens)
        prompt = Prompt("mixture", tokens, floor, named_density(tokens))
        compare(run, prompt, [*masks((GAMMA,), floor), *calls(BACKENDS[0], GAMMAS, floor)])
        compare(run, prompt, [*dense_methods(), *kernels(floor)])
        compare(run, prompt, masks(sorted({*GAMMAS} - {GAMMA}), floor))
        for backend in BACKENDS[1:]:
            compare(run, prompt, calls(backend, GAMMAS, floor))
        for name in range(0, 2 * len(OTHER_MASKS), 2):
            compare(run, prompt, others()[name : name + 2])
        if floor != DEFAULT_FLOOR:
            compare(run, prompt, [*masks((GAMMA,), DEFAULT_FLOOR), *calls(BACKENDS[0], (GAMMA,), DEFAULT_FLOOR)])
        if tokens == 131072:
            compare(run, Prompt("mixture", tokens, floor, 0.1), kernels(floor))
        if tokens == 16384 and not ON_GPU:
            compare(run, Prompt("mixture", tokens, floor, 0.15), [*masks((GAMMA,), floor), *calls(BACKENDS[0], (GAMMA,), floor)])
        if tokens in (32768, 131072) or not ON_GPU:
            topics = Prompt("topics", tokens, floor, named_density(tokens))
            compare(run, topics, [*masks((GAMMA,), floor), *calls(BACKENDS[0], (GAMMA,), floor)])


def breakeven(run: Run, lengths: Sequence[int]) -> None:
    """The whole call against dense attention at the default floor, over densities and on captured inputs."""
    group = calls(BACKENDS[0], (_BREAK_EVEN_GAMMA,), DEFAULT_FLOOR)
    for tokens in lengths:
        for aim in _AIMS:
            compare(run, Prompt("mixture", tokens, DEFAULT_FLOOR, aim=aim), group)
    for tokens in lengths:
        compare(run, Prompt("retriever", tokens, DEFAULT_FLOOR), group)
        compare(run, Prompt("retriever, layers 1 and 2", tokens, DEFAULT_FLOOR), group)


def stages(run: Run, lengths: Sequence[int]) -> None:
    """Where a call's time goes, by kernel."""
    for tokens in lengths:
        for input in ("mixture", "topics"):
            floor = floor_of(tokens)
            prompt = Prompt(input, tokens, floor, named_density(tokens))
            for compared in [*masks((GAMMA,), floor), *calls(BACKENDS[0], (GAMMA,), floor)]:

                def work(missing: list[Row], prompt: Prompt = prompt, compared: Compared = compared) -> None:
                    tensors = prompt.tensors(run.results)
                    fields = prompt.measured(run.results, GAMMA, prompt.min_budget)
                    with torch.no_grad():
                        methods.warm(compared.make, tensors)
                        fields |= stage_fields(compared.make(tensors))
                    run.add(missing[0] | shape_fields(tensors) | fields)

                run.step(f"{input}, {tokens:,} tokens, {compared.method}", [compared.key(prompt)], work)


def memory(run: Run, lengths: Sequence[int]) -> None:
    """Peak memory of a call beyond query, key, value and output."""
    for tokens in lengths:
        floor = floor_of(tokens)
        prompt = Prompt("mixture", tokens, floor, named_density(tokens))
        whole = [compared for backend in BACKENDS for compared in calls(backend, (GAMMA,), floor)]
        for compared in [*whole, *masks((GAMMA,), floor), *dense_methods()[:1]]:
            measure_memory(run, prompt, compared)


def measure_memory(run: Run, prompt: Prompt, compared: Compared) -> None:
    """One row of the memory part."""

    def work(missing: list[Row]) -> None:
        tensors = prompt.tensors(run.results)
        fields: Row = {} if compared.is_dense else dict(prompt.measured(run.results, GAMMA, prompt.min_budget))
        with torch.no_grad():
            methods.warm(compared.make, tensors)
            method = compared.make(tensors)
            method()
            peak, result = peak_bytes(method)
        # a mask's lists are what it costs; a call's output is not
        extra = peak if compared.method == "mask" else peak - result
        fields |= {"peak_mb": peak / 2**20, "result_mb": result / 2**20, "extra_mb": extra / 2**20}
        run.add(missing[0] | shape_fields(tensors) | fields)

    run.step(f"memory, {prompt.tokens:,} tokens, {compared.method}", [compared.key(prompt)], work)


def long(run: Run, lengths: Sequence[int]) -> None:
    """Very long prompts: mask, call and dense attention once it is known to end soon enough; eager only."""
    for tokens in lengths:
        floor = floor_of(tokens)
        prompt = Prompt("mixture", tokens, floor, named_density(tokens))
        sparse = [*masks((GAMMA,), floor), *calls(BACKENDS[0], (GAMMA,), floor)]
        # a third of what cuDNN reaches on an H200
        seconds = 2 * SHAPE["num_heads"] * 128 * tokens**2 / 200e12
        if seconds > _DENSE_LIMIT:
            run.say(f"dense attention of {tokens:,} tokens may take over {_DENSE_LIMIT:.0f} s and is left out")
            continue
        compare(run, prompt, [*sparse, *dense_methods()[:1]], rounds=3, graphs=False)
        for backend in BACKENDS[1:]:
            compare(run, prompt, calls(backend, (GAMMA,), floor), rounds=1, graphs=False)


def compilation(run: Run, lengths: Sequence[int]) -> None:
    """Compile time and number of graphs over forty lengths, and what compiling for one length would gain."""
    for backend in BACKENDS:
        key = calls(backend, (GAMMA,), DEFAULT_FLOOR)[0].key(Prompt("mixture", lengths[-1], DEFAULT_FLOOR))

        def work(missing: list[Row], backend: str = backend) -> None:
            fields = compile_rows(backend, lengths[0], lengths[-1], GAMMA, run.say)
            run.add(missing[0] | fields)

        run.step(f"compile, {backend}", [key], work)


PARTS: dict[str, Callable[[Run, Sequence[int]], None]] = {
    "latency": latency,
    "breakeven": breakeven,
    "stages": stages,
    "memory": memory,
    "compile": compilation,
    "long": long,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns how many rows are left for the next run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=tuple(PARTS))
    parser.add_argument("--again", action="store_true", help="measure rows that are there too, and replace them")
    parser.add_argument("--results", type=Path, default=FOLDER, help="folder of the results")
    parser.add_argument("--lengths", help="tokens, separated by commas, instead of the part's own")
    parser.add_argument("--minutes", type=float, default=7.5, help="stop before this")
    options = parser.parse_args(arguments)
    if options.part not in LENGTHS:
        parser.error(f"{options.part} needs a CUDA device")
    lengths = LENGTHS[options.part]
    if options.lengths:
        lengths = tuple(int(word) for word in options.lengths.split(","))
    # advice that torch's compiler gives to its own users
    warnings.filterwarnings("ignore", category=UserWarning, module=r"torch\._inductor")
    results = Results(options.results, options.again)
    run = Run(options.part, results, options.minutes * 60)
    run.say(f"{options.part} on {results.device}, torch {torch.__version__}, into {results.path}")
    PARTS[options.part](run, lengths)
    run.say(f"{run.left} rows are left: run the same command again" if run.left else "complete")
    return run.left


if __name__ == "__main__":
    main()
