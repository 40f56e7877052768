"""Measure a part of the speed report: ``python -m bench.speed.run latency``, or ``make bench PART=latency``.

``latency`` times dense kernels, masks, kernels and calls at several densities in turns, plain and as CUDA graphs; ``memory``
gives peaks beyond query, key, value and output; ``compile`` times first calls at forty lengths. Rows go to a CSV file. The same
command resumes; errors become rows.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch._dynamo.utils import counters

from bench import ON_GPU
from bench.prompts.captured import retriever_prompt
from bench.prompts.structured import SHAPE, Tensors, named_density, structured_prompt
from bench.rows import Sheet
from bench.speed import calls, clock
from bench.speed.calls import BACKENDS
from bench.speed.clock import Call, DeviceLostError

RESULTS = Path(__file__).parents[1] / "results"
IDENTITY = ("device", "torch", "part", "input", "tokens", "what", "method", "wanted", "backend")
# `wanted` is the density aimed for, `fastest` the fastest dense kernel in the same turns
COLUMNS = (*IDENTITY, "options", "density", "measure", "value", "fastest", "fastest_value", "date")
LENGTHS = {
    "latency": (8192, 16384, 32768, 65536, 131072) if ON_GPU else (4096, 8192),
    "memory": (8192, 32768, 131072, 524288),
    "compile": (1024, 131072) if ON_GPU else (1024, 2048),
}
WANTED = (0.05, 0.1, 0.2, 0.3, 0.5)
DEFAULTS = {"hybrid": {"gamma": 0.9}, "flexprefill": {"gamma": 0.9}, "published": {"gamma": 0.9}}
OURS = ("hybrid", "flexprefill")
OTHERS = ("published", "xattention", "flash_prefill")
# a call this far from the wanted density is left out
_FAR = 0.05
# from this length on, no graphs and only our methods
_LONG = 262144
_AT_ONCE = 6  # variants that take turns


class Variant(NamedTuple):
    """Calls to time, under the names of their rows."""

    row: dict[str, Any]
    make: Callable[[Tensors], tuple[Call, dict[str, Any]]]  # the call, and fields of its rows found on the way


def variant(what: str, method: str, options: dict[str, Any], backend: str = "", wanted: float | None = None) -> Variant:
    """A mask, kernel or call, at density `wanted` if given."""

    def make(tensors: Tensors) -> tuple[Call, dict[str, Any]]:
        given, kept = options, None
        if method == "random_blocks":
            given = {**options, "density": wanted}
        elif wanted is not None:
            given, kept = calls.at_density(tensors, method, wanted, **options)
            if abs(kept - wanted) > _FAR:
                raise ValueError(f"density must be near {wanted}; got {kept:.3f}")
        kept = calls.density(tensors, method, given) if kept is None else kept
        made = calls.mask(tensors, method, given) if what == "mask" else getattr(calls, what)(tensors, method, given, backend)
        return made, {"options": given, "density": kept}

    return Variant({"what": what, "method": method, "backend": backend, "wanted": wanted}, make)


def latency_variants(tokens: int) -> Iterator[Variant]:
    """All variants except dense attention, most important first."""
    auto = BACKENDS[0]
    for method in OURS:
        yield variant("mask", method, DEFAULTS[method])
        yield variant("call", method, DEFAULTS[method], auto)
        for wanted in WANTED:
            yield variant("call", method, {}, auto, wanted)
    if tokens >= _LONG:
        return
    for backend, wanted in itertools.product(BACKENDS, WANTED):
        yield variant("kernel", "random_blocks", {}, backend, wanted)
    for backend, wanted in itertools.product(BACKENDS[1:], WANTED):
        yield variant("call", "hybrid", {}, backend, wanted)
    for method in OTHERS:
        yield variant("mask", method, DEFAULTS.get(method, {}))
        yield variant("call", method, DEFAULTS.get(method, {}), auto)


def sheet_of(path: Path | None) -> Sheet:
    """Rows of a file, default bench/results/speed-<device>.csv."""
    name = "-".join(clock.device_name().lower().replace(",", "").split())
    return Sheet(path or RESULTS / f"speed-{name}.csv", COLUMNS, IDENTITY)


class Run:
    """One part's missing measurements and remaining time."""

    def __init__(self, part: str, sheet: Sheet, minutes: float) -> None:
        self.part, self.sheet = part, sheet
        self.stop = time.monotonic() + 60 * minutes
        self.common = {"device": clock.device_name(), "torch": torch.__version__, "part": part}
        self.left = 0
        self.fastest: dict[int, str] = {}  # dense kernel by length
        self._tensors: dict[tuple[str, int], Tensors] = {}

    def tensors(self, name: str, tokens: int) -> Tensors:
        """Query, key and value of an input; the last one is cached."""
        if (name, tokens) not in self._tensors:
            self._tensors.clear()
            if name == "retriever":
                made = retriever_prompt(tokens, device=SHAPE["device"], dtype=SHAPE["dtype"])
            else:
                made = structured_prompt(tokens, named_density(tokens), **SHAPE)
            self._tensors[name, tokens] = made
        return self._tensors[name, tokens]

    def wants(self, **row: Any) -> bool:
        """True if a row is missing and there is time; counts missing rows without time."""
        if self.sheet.has(**self.common, **row):
            return False
        in_time = time.monotonic() <= self.stop
        self.left += not in_time
        return in_time

    def add(self, row: dict[str, Any], measured: dict[str, float | str], **fields: Any) -> None:
        """Add and print a row per measure."""
        date = datetime.date.today().isoformat()
        for measure, value in measured.items():
            self.sheet.add(**self.common, **row, **fields, measure=measure, value=value, date=date)
        print("  ", row, measured, flush=True)


def ready(made: Variant, tensors: Tensors) -> tuple[Call, dict[str, Any]]:
    """The call, compiled at a short length first, so the timed code serves all lengths."""
    short = min(1536, tensors[0].shape[2] // 2) // 128 * 128
    first = variant(made.row["what"], made.row["method"], DEFAULTS.get(made.row["method"], {}), made.row["backend"])
    if short and made.row["method"] != "random_blocks":
        first.make(tuple(x[:, :, :short].contiguous() for x in tensors))[0]()  # type: ignore[arg-type]  # three of them
    call, fields = made.make(tensors)
    call()
    return call, fields


def latency(run: Run, lengths: Sequence[int]) -> None:
    """Time variants in turns with the fastest dense kernel."""
    for tokens, name in itertools.product(lengths, ("structured", "retriever")):
        where = {"input": name, "tokens": tokens}
        variants = list(latency_variants(tokens))
        if name == "retriever":
            variants = [variant("call", method, DEFAULTS[method], BACKENDS[0]) for method in OURS]
        for first in range(0, len(variants), _AT_ONCE):
            wanted = [each for each in variants[first : first + _AT_ONCE] if run.wants(**where, **each.row)]
            if wanted:
                _time(run, where, wanted, fastest_dense(run, name, tokens))


def fastest_dense(run: Run, name: str, tokens: int) -> dict[str, Call]:
    """The machine's fastest dense kernel, measured once per length."""
    dense, known = calls.dense_calls(run.tensors(name, tokens)), run.fastest.get(tokens)
    if known is None:
        taken = clock.in_turns(dense, rounds=1 if tokens >= _LONG else 3)
        known = min((each for each in taken if isinstance(taken[each], float)), key=lambda each: taken[each])
        run.fastest[tokens] = known
        row = {"input": name, "tokens": tokens, "what": "dense"}
        for kernel, value in taken.items():
            if run.wants(**row, backend=kernel.removeprefix("dense ")):
                run.add({**row, "backend": kernel.removeprefix("dense ")}, {"eager_ms": value}, density=1.0)
    return {known: dense[known]}


def _time(run: Run, where: dict[str, Any], wanted: Sequence[Variant], dense: dict[str, Call]) -> None:
    made: dict[int, Call] = {}
    fields: dict[int, dict[str, Any]] = {}
    for number, each in enumerate(wanted):
        try:
            made[number], fields[number] = ready(each, run.tensors(where["input"], where["tokens"]))
        except (Exception, DeviceLostError) as error:
            run.add({**where, **each.row}, {"error": clock.text_of(error)})
    ((fastest, kernel),) = dense.items()
    for measure, take in (("eager_ms", clock.in_turns), ("graph_ms", clock.graphs_in_turns)):
        if measure == "graph_ms" and (where["tokens"] >= _LONG or not ON_GPU):
            continue
        taken = take({-1: kernel, **made})
        base = taken.pop(-1)
        for number, value in taken.items():
            reference = {"fastest": fastest, "fastest_value": base} if isinstance(base, float) else {}
            run.add({**where, **wanted[number].row}, {measure: value}, **reference, **fields[number])
    made.clear()
    clock.free()


def memory(run: Run, lengths: Sequence[int]) -> None:
    """Peak of device memory; a mask's lists count, a call's output does not."""
    for tokens, method, what in itertools.product(lengths, (*OURS, *OTHERS), ("mask", "call")):
        made = variant(what, method, DEFAULTS.get(method, {}), BACKENDS[0] if what == "call" else "")
        row = {"input": "structured", "tokens": tokens, **made.row}
        if not run.wants(**row) or (tokens >= _LONG and method in OTHERS):
            continue
        try:
            call, fields = ready(made, run.tensors("structured", tokens))
            peak, result = clock.peak_bytes(call)
        except (Exception, DeviceLostError) as error:
            run.add(row, {"error": clock.text_of(error)})
            continue
        extra = peak if what == "mask" else peak - result
        run.add(row, {"extra_mb": extra / 2**20, "peak_mb": peak / 2**20}, **fields)


def mixed_lengths(shortest: int, longest: int, count: int = 40) -> list[int]:
    """Lengths in geometric progression, short and long ones alternating."""
    factor = (longest / shortest) ** (1 / (count - 1))
    lengths = [round(shortest * factor**step) for step in range(count)]
    return [lengths[step * 17 % count] for step in range(count)]


def compile_times(run: Run, lengths: Sequence[int]) -> None:
    """First calls at many lengths, and compiled graphs by then."""
    for method in OURS:
        torch._dynamo.reset()
        counters.clear()
        for tokens in mixed_lengths(lengths[0], lengths[-1]):
            row = {"input": "structured", "tokens": tokens, "what": "call", "method": method, "backend": BACKENDS[0]}
            if run.wants(**row):
                taken = clock.seconds(calls.call(run.tensors("structured", tokens), method, DEFAULTS[method], BACKENDS[0]))
                run.add(row, {"first_call_s": taken, "graphs": float(counters["stats"]["unique_graphs"])})


PARTS: dict[str, Callable[[Run, Sequence[int]], None]] = {
    "latency": latency,
    "memory": memory,
    "compile": compile_times,
}


@torch.no_grad()
def main(arguments: Sequence[str] | None = None) -> int:
    """Run a part; return the number of rows left."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=tuple(PARTS))
    parser.add_argument("--out", type=Path, help="CSV file; none: bench/results/speed-<device>.csv")
    parser.add_argument("--lengths", help="tokens, separated by commas; default: the part's own")
    parser.add_argument("--minutes", type=float, default=7.5, help="no new measurement after that (7.5)")
    options = parser.parse_args(arguments)
    if options.part == "memory" and not ON_GPU:
        parser.error("memory needs a CUDA device")
    lengths = [int(word) for word in options.lengths.split(",")] if options.lengths else LENGTHS[options.part]
    # advice to users of torch's compiler
    warnings.filterwarnings("ignore", category=UserWarning, module=r"torch\._inductor")
    run = Run(options.part, sheet_of(options.out), options.minutes)
    print(f"{options.part} on {run.common['device']}, torch {torch.__version__}, into {run.sheet.path}", flush=True)
    PARTS[options.part](run, lengths)
    print(f"{run.left} measurements are left: run the same command again" if run.left else "complete", flush=True)
    return run.left


if __name__ == "__main__":
    main()
