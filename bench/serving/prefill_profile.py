"""Take a prefill in vLLM apart, by length and attention: ``python -m bench.serving.prefill_profile --shape NAME --csv X``.

One engine with the plug-in serves each prompt with each kind of attention in turn: ``stock`` (the engine's kernel for all rows),
``hybrid`` at the densities of `OWN_DENSITY`, ``random_blocks`` at the same or at ``--density``. Random weights have no density of
their own: `min_budget` sets hybrid's, with thresholds that keep nothing else. Rows go to a CSV file as they are measured:

``ttft``
    Milliseconds to the first token of `prompts` prompts that come at once and share one step: the median.
``span``
    Milliseconds of the step between CUDA events: ``mask``, ``gather``, ``kernel`` (with what lays out its lists), and
    ``attention``, all calls of the plug-in, which holds these three.
``kernels``
    Milliseconds of the GPU's kernels by kind, ``idle`` between them, and ``host``: before the first and after the last one. One
    more row counts the kernels.
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from bench.prompts.models import ALL_SHAPES
from bench.rows import Sheet
from bench.serving import first_token
from bench.serving.table import kind_of
from bench.speed import random_blocks as random_blocks  # registers its method
from bench.speed.clock import device_name, synchronize
from flexmask.block_masks.hybrid import NEAREST

# of hybrid at gamma 0.9 on SmolLM2 (bench/FIDELITY.md), by tokens; shorter and longer prompts take the nearest length's
OWN_DENSITY = {8192: 0.257, 16384: 0.232, 32768: 0.170, 65536: 0.121}
BLOCK = 128
STOCK, HYBRID, RANDOM = "stock", "hybrid", "random_blocks"
IDENTITY = ("kind", "model", "layers", "attention", "prompts", "prompt_tokens", "chunk", "part", "kv_cache", "device", "vllm")
COLUMNS = (*IDENTITY, "milliseconds", "density", "rounds", "settings", "torch")


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--model", help="folder of a model")
    which.add_argument("--shape", choices=sorted(ALL_SHAPES), help="this model's shape, with random weights")
    parser.add_argument("--layers", type=int, help="with --shape: fewer layers than the model has")
    lengths = [32768, 16384, 8192, 4096, 65536, 131072]
    parser.add_argument("--prompt-tokens", type=int, nargs="*", default=lengths, help="one prompt at a time, of so many tokens")
    parser.add_argument("--at-once", type=json.loads, default=[], help="several prompts in a step: [[8, 8192], [4, 32768]]")
    parser.add_argument("--profile", type=int, nargs="*", default=[32768], help="lengths that are taken apart")
    parser.add_argument("--chunk", type=int, help="rows of a step at most, default: the whole of all prompts")
    parser.add_argument("--attention", nargs="+", default=[STOCK, HYBRID, RANDOM], choices=[STOCK, HYBRID, RANDOM])
    parser.add_argument("--density", type=float, help="of random blocks; default: hybrid's own")
    parser.add_argument("--rounds", type=int, default=3, help="rounds that a median is taken over")
    parser.add_argument("--kernel", default="FLASH_ATTN", choices=("FLASH_ATTN", "TRITON_ATTN"))
    parser.add_argument("--kv-cache", default="auto", help="vLLM's kv_cache_dtype")
    parser.add_argument("--cache-gb", type=float, help="GiB of KV cache; default: what vLLM finds to be left")
    parser.add_argument("--utilization", type=float, default=0.9, help="share of the GPU's memory, as vLLM's")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--csv", type=Path, required=True)
    return parser.parse_args(arguments)


def own_density(tokens: int) -> float:
    """Hybrid's density on real text at the measured length nearest to `tokens`."""
    return OWN_DENSITY[min(OWN_DENSITY, key=lambda length: abs(math.log(length / tokens)))]


def settings_of(attention: str, tokens: int, density: float | None = None) -> dict[str, Any]:
    """The settings of one kind of attention for prompts of so many tokens; none for stock. `density` is that of random blocks."""
    if attention == STOCK:
        return {}
    if attention == RANDOM:
        return {"method": RANDOM, "density": density or own_density(tokens), "max_mask_bytes": 2**31}
    number = -(-tokens // BLOCK)
    wanted = own_density(tokens) * number * (number + 1) / 2
    blocks = min(range(1, number + 1), key=lambda nearest: abs(_kept(nearest, number) - wanted))
    return {"method": HYBRID, "gamma": 0.1, "min_coverage": 0.0, "min_budget": blocks * BLOCK}


def _kept(nearest: int, number: int) -> int:
    """Blocks that hybrid keeps of so many query blocks where attention is even: the nearest ones and the first."""
    return sum(min(seen, nearest + 1) for seen in range(1, number)) + min(number, NEAREST * nearest + 1)


class Spans:
    """Milliseconds between events on the device, or on the clock of a CPU, summed up by name."""

    def __init__(self, device: str) -> None:
        self.on_gpu = device == "cuda"
        self._found: dict[str, list[tuple[Any, Any]]] = defaultdict(list)

    def _now(self) -> Any:
        if not self.on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def around(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, each of its calls between two events."""

        def timed(*arguments: Any, **options: Any) -> Any:
            start = self._now()
            result = function(*arguments, **options)
            self._found[name].append((start, self._now()))
            return result

        return timed

    def milliseconds(self) -> dict[str, float]:
        """The sums; waits for the device."""
        synchronize()
        return {
            name: sum(start.elapsed_time(stop) if self.on_gpu else 1e3 * (stop - start) for start, stop in pairs)
            for name, pairs in self._found.items()
        }


class Engine:
    """The engine, whose attention can be changed between two prompts."""

    def __init__(self, options: argparse.Namespace) -> None:
        from flexmask.integrations.serving.layers import SparseLayer
        from flexmask.integrations.vllm.engine import engine_of

        self.options = options
        self.llm = make_engine(options)
        self.engine = engine_of(self.llm.llm_engine.vllm_config)
        impls = [getattr(each, "impl", None) for each in self.engine.layers.values()]
        self.impls: list[Any] = [impl for impl in impls if hasattr(impl, "flexmask_role")]
        self.roles = [impl._role for impl in self.impls]
        if not self.roles or not all(isinstance(role, SparseLayer) for role in self.roles):
            raise SystemExit(f"no layer prefills sparse: {self.roles[:1]}")
        builder: Any = importlib.import_module("flexmask.integrations.vllm.builder")
        self._plan, self.dense = builder.plan_step, False
        builder.plan_step = self._planned

    def _planned(self, starts: Any, lengths: Any, policy: Any, *rest: Any) -> Any:
        return self._plan(starts, lengths, policy._replace(least_rows=sys.maxsize) if self.dense else policy, *rest)

    def use(self, attention: str, tokens: int) -> dict[str, Any]:
        """Have all layers attend so from now on; gives the settings."""
        from flexmask.settings import PrefillSettings

        settings = settings_of(attention, tokens, self.options.density)
        self.dense = attention == STOCK
        if not self.dense:
            own = PrefillSettings.from_dict({**settings, "dense_below": 0})
            for impl, role in zip(self.impls, self.roles, strict=True):
                run = role.run._replace(max_mask_bytes=own.max_mask_bytes)
                impl._role = replace(role, selector=own.selector(), run=run)
        return settings

    def prefill(self, prompts: int, tokens: int) -> float:
        """Seconds until every one of so many prompts has its first token."""
        return first_token.generate(self.llm, first_token.prompts(self.options, tokens, prompts), 1)[0]

    @contextmanager
    def spans(self) -> Iterator[Spans]:
        """Time the plug-in's calls inside."""
        module, spans = importlib.import_module("flexmask.attend"), Spans(self.options.device)
        patched: list[tuple[Any, str]] = [(module, "select_blocks"), (module, "attend_heads")]
        names = ["mask", "kernel"]
        cls = type(self.impls[0])
        for name, method in (("gather", "flexmask_gather"), ("attention", "forward_mha"), ("attention", "forward")):
            if hasattr(cls, method) and not (method == "forward" and hasattr(cls, "forward_mha")):
                patched, names = [*patched, (cls, method)], [*names, name]
        found = [getattr(owner, attribute) for owner, attribute in patched]
        inherited = [isinstance(owner, type) and attribute not in vars(owner) for owner, attribute in patched]
        for (owner, attribute), name, function in zip(patched, names, found, strict=True):
            setattr(owner, attribute, spans.around(name, function))
        try:
            yield spans
        finally:
            for (owner, attribute), function, own in zip(patched, found, inherited, strict=True):
                delattr(owner, attribute) if own else setattr(owner, attribute, function)


def make_engine(options: argparse.Namespace) -> Any:
    """Start vLLM with the plug-in, for steps that hold all that comes at once."""
    asked = asked_of(options)
    names = ("model", "shape", "layers", "device", "dtype", "utilization", "cache_gb")
    given = argparse.Namespace(**{name: getattr(options, name) for name in names}, stock=False, tensor_parallel=1, new_tokens=1)
    given.prompt_tokens, given.at_once = [tokens for _, tokens in asked], max(prompts for prompts, _ in asked)
    # the start compiles hybrid with one of its budgets
    given.settings = {"dense_below": 0, "kernel": options.kernel, **settings_of(HYBRID, 32768, options.density)}
    rows = options.chunk or max(prompts * tokens for prompts, tokens in asked)
    return first_token.make_engine(given, max_num_batched_tokens=rows, kv_cache_dtype=options.kv_cache, disable_log_stats=True)


def asked_of(options: argparse.Namespace) -> list[tuple[int, int]]:
    """Prompts at once and their tokens, in the order in which they are measured."""
    return [(1, tokens) for tokens in options.prompt_tokens] + [(prompts, tokens) for prompts, tokens in options.at_once]


def time_to_first_token(engine: Engine, prompts: int, tokens: int) -> Iterator[dict[str, Any]]:
    """The kinds of attention in turn; their first prefills compile and are not counted."""
    attentions, counters = engine.options.attention, engine.engine.counters
    times: dict[str, list[float]] = defaultdict(list)
    density: dict[str, float | None] = {}
    settings = {}
    for number in range(engine.options.rounds + 1):
        for attention in attentions:
            settings[attention] = engine.use(attention, tokens)
            counters.reset()
            seconds = engine.prefill(prompts, tokens)
            if number:
                times[attention].append(seconds)
            density[attention] = counters.density
    for attention in attentions:
        row = {"kind": "ttft", "attention": attention, "prompts": prompts, "prompt_tokens": tokens, "part": "first token"}
        yield row | {
            "milliseconds": 1e3 * statistics.median(times[attention]),
            "density": density[attention],
            "rounds": engine.options.rounds,
            "settings": settings[attention],
        }


def taken_apart(engine: Engine, prompts: int, tokens: int) -> Iterator[dict[str, Any]]:
    """Spans and kernels of a step with each kind of attention, all of which `time_to_first_token` has compiled."""
    for attention in engine.options.attention:
        settings = engine.use(attention, tokens)
        with engine.spans() as spans:
            engine.prefill(prompts, tokens)
        row = {"attention": attention, "prompts": prompts, "prompt_tokens": tokens, "rounds": 1, "settings": settings}
        for part, milliseconds in spans.milliseconds().items():
            yield row | {"kind": "span", "part": part, "milliseconds": milliseconds}
        if engine.options.device == "cuda":
            for part, milliseconds in kernels(lambda: engine.prefill(prompts, tokens)).items():
                yield row | {"kind": "kernels", "part": part, "milliseconds": milliseconds}


def kernels(call: Callable[[], float]) -> dict[str, float]:
    """Milliseconds by kind of kernel, idle and on the host, in one call that returns its seconds; and the number of kernels."""
    synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        seconds = call()
        synchronize()
    events = [event for event in profile.events() or [] if str(event.device_type).endswith("CUDA")]
    return parts_of([(event.name, event.time_range.start, event.time_range.elapsed_us()) for event in events], seconds)


def parts_of(events: Sequence[tuple[str, float, float]], seconds: float) -> dict[str, float]:
    """The parts of a step from its kernels: name, start and duration in microseconds."""
    found: dict[str, float] = defaultdict(float)
    busy_until, idle = 0.0, 0.0
    ordered = sorted(events, key=lambda event: event[1])
    for number, (name, start, duration) in enumerate(ordered):
        found[kind_of(name)] += duration / 1e3
        idle += max(0.0, start - busy_until) / 1e3 if number else 0.0
        busy_until = max(busy_until, start + duration)
    span = (busy_until - ordered[0][1]) / 1e3 if ordered else 0.0
    return {**found, "idle": idle, "host": 1e3 * seconds - span, "number of kernels": float(len(ordered))}


def main(arguments: Sequence[str] | None = None) -> None:
    """Start the engine, measure."""
    options = parse(arguments)
    sheet = Sheet(options.csv, COLUMNS, IDENTITY)
    engine = Engine(options)
    import vllm

    common = {"model": options.model or options.shape, "layers": options.layers, "chunk": options.chunk}
    common |= {"kv_cache": options.kv_cache, "device": device_name(), "vllm": vllm.__version__, "torch": torch.__version__}
    for prompts, tokens in asked_of(options):
        measured = [time_to_first_token] + [taken_apart] * (tokens in options.profile)
        for measure in measured:
            for row in measure(engine, prompts, tokens):
                sheet.add(**common, **row)
                print({**row, "milliseconds": round(row["milliseconds"], 3)}, flush=True)


if __name__ == "__main__":
    main()
