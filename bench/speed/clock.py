"""Timing: warm, synchronized, in turns; graphs, kernels, memory."""

from __future__ import annotations

import gc
import platform
import statistics
import time
from collections.abc import Callable, Mapping
from importlib import metadata
from typing import Any, TypeVar

import torch

from bench import ON_GPU

Call = Callable[[], Any]
Name = TypeVar("Name")
ROUNDS = 9 if ON_GPU else 3
# calls in a row before one wait for the device
MAX_CALLS = 10 if ON_GPU else 1
# seconds a round of calls should last, within 1 to MAX_CALLS calls
_ROUND = 0.1


class DeviceLostError(SystemExit):
    """An illegal access made the GPU unusable for this process; the next run resumes."""


def device_name() -> str:
    return torch.cuda.get_device_name() if ON_GPU else f"CPU {platform.machine()}, {torch.get_num_threads()} threads"


def version(package: str) -> str:
    """An installed package's release, or ``missing``."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "missing"


def synchronize() -> None:
    if ON_GPU:
        torch.cuda.synchronize()


def free() -> None:
    """Release unused device memory."""
    gc.collect()
    if ON_GPU:
        synchronize()
        torch.cuda.empty_cache()


def seconds(call: Call, calls: int = 1) -> float:
    """Seconds per call, of calls in a row with one wait at the end."""
    synchronize()
    start = time.perf_counter()
    for _ in range(calls):
        call()
    synchronize()
    return (time.perf_counter() - start) / calls


def text_of(error: BaseException) -> str:
    """An error's text for a row; DeviceLostError if the process lost the device."""
    text = f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]
    try:
        synchronize()
    except Exception:
        raise DeviceLostError(f"this process lost the device; run the same command again. The error was: {text}") from error
    return text


def as_graph(call: Call) -> Call:
    """The replay of a CUDA graph of `call`, which must be warm."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call()
    torch.cuda.current_stream().wait_stream(side)
    synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = call()

    def replay() -> Any:
        graph.replay()
        return kept

    return replay


def in_turns(calls: Mapping[Name, Call], rounds: int = ROUNDS) -> dict[Name, float | str]:
    """Median milliseconds of each call, or its error.

    After two warm-up calls each, the calls take turns, so slow spells of the machine hit all of them.
    """
    found: dict[Name, float | str] = {}
    repeats: dict[Name, int] = {}
    for name, call in calls.items():
        try:
            seconds(call)
            repeats[name] = min(MAX_CALLS, max(1, int(_ROUND / seconds(call))))
        except Exception as error:
            found[name] = text_of(error)
    taken: dict[Name, list[float]] = {name: [] for name in repeats}
    for _ in range(rounds):
        for name in taken:
            taken[name].append(seconds(calls[name], repeats[name]))
    return found | {name: 1e3 * statistics.median(times) for name, times in taken.items()}


def graphs_in_turns(calls: Mapping[Name, Call], rounds: int = ROUNDS) -> dict[Name, float | str]:
    """`in_turns` of CUDA graphs; empty without a GPU."""
    found: dict[Name, float | str] = {}
    graphs: dict[Name, Call] = {}
    for name, call in calls.items() if ON_GPU else ():
        try:
            graphs[name] = as_graph(call)
        except Exception as error:
            found[name] = text_of(error)
    found |= in_turns(graphs, rounds)
    graphs.clear()
    free()
    return found


def kernels_of(call: Call) -> list[tuple[str, float]]:
    """Name and microseconds of the GPU's kernels in one call, in launch order."""
    synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
        synchronize()
    events = [event for event in profile.events() or [] if str(event.device_type).endswith("CUDA")]
    events.sort(key=lambda event: event.time_range.start)
    return [(event.name, float(event.time_range.elapsed_us())) for event in events]


def peak_bytes(call: Call) -> tuple[int, int]:
    """Peak of device memory in a call above that before, and the bytes that its result holds."""
    free()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    result = call()
    synchronize()
    peak, after = torch.cuda.max_memory_allocated() - before, torch.cuda.memory_allocated() - before
    del result
    return peak, after
