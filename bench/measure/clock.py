"""Timing: warm, synchronised, medians over rounds in which the compared methods take turns; eager and as a CUDA graph."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch

from bench import ON_GPU

Method = Callable[[], Any]
Name = TypeVar("Name")
ROUNDS = 9 if ON_GPU else 3
# calls in a row before one wait for the device
MOST_CALLS = 10 if ON_GPU else 1
# seconds a round of calls should last, within 1 to MOST_CALLS calls
_ROUND = 0.1


class DeviceLostError(SystemExit):
    """An illegal access made the GPU unusable for this process; the next run goes on."""


def synchronize() -> None:
    """Wait for the device; without this a timing covers the launch only."""
    if ON_GPU:
        torch.cuda.synchronize()


def seconds(method: Method, calls: int = 1) -> float:
    """Time `calls` back-to-back calls with one wait at the end, as a model runs its layers; return seconds per call."""
    synchronize()
    start = time.perf_counter()
    for _ in range(calls):
        method()
    synchronize()
    return (time.perf_counter() - start) / calls


def every(calls: int, method: Method) -> Method:
    """Return `method` with a wait for the device after every `calls` calls, for a harness that keeps its own time."""
    made = 0

    def call() -> None:
        nonlocal made
        method()
        made += 1
        if made % calls == 0:
            synchronize()

    return call


def text_of(error: BaseException) -> str:
    """Shorten an error's text to fit a row.

    Raises
    ------
    DeviceLostError
        If this process can no longer use the device.
    """
    text = f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]
    if not isinstance(error, DeviceLostError):
        try:
            synchronize()
        except Exception:
            raise DeviceLostError(f"this process lost the device; run the same command again. The error was: {text}") from error
    return text


def graph_replay(method: Method) -> Method:
    """Capture the method in a CUDA graph and return its replay. Run the method before, or the graph captures its compilation."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        method()
    torch.cuda.current_stream().wait_stream(side)
    synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = method()

    def replay() -> Any:
        graph.replay()
        return kept

    return replay


def interleaved(methods: Mapping[Name, Method], rounds: int = ROUNDS) -> dict[Name, float | str]:
    """Return each method's median milliseconds per call, or the error it raised.

    Two calls warm each method up. Then the methods take turns, round by round, so that a slow spell of the machine hits them all.
    """
    found: dict[Name, float | str] = {}
    calls: dict[Name, int] = {}
    for name, method in methods.items():
        try:
            seconds(method)
            calls[name] = min(MOST_CALLS, max(1, int(_ROUND / seconds(method))))
        except Exception as error:
            found[name] = text_of(error)
    times: dict[Name, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name in times:
            times[name].append(seconds(methods[name], calls[name]))
    return found | {name: 1e3 * statistics.median(taken) for name, taken in times.items()}


def eager_times(methods: Mapping[Name, Method], rounds: int = ROUNDS) -> dict[Name, dict[str, Any]]:
    """Return by method ``wall_ms`` of eager calls, or ``error``."""
    taken = interleaved(methods, rounds)
    return {name: {"error": value} if isinstance(value, str) else {"wall_ms": value} for name, value in taken.items()}


def graph_times(methods: Mapping[Name, Method], rounds: int = ROUNDS) -> dict[Name, dict[str, Any]]:
    """Return by method ``graph_ms`` of CUDA graph replays, or ``graph_error``; nothing without a GPU."""
    rows: dict[Name, dict[str, Any]] = {}
    graphs: dict[Name, Method] = {}
    for name, method in methods.items() if ON_GPU else ():
        try:
            method()  # or the graph would capture its compilation
            graphs[name] = graph_replay(method)
        except Exception as error:
            rows[name] = {"graph_error": text_of(error)}
            synchronize()
    for name, value in interleaved(graphs, rounds).items():
        rows[name] = {"graph_error" if isinstance(value, str) else "graph_ms": value}
    graphs.clear()
    free()
    return rows


def eager_and_graph_times(methods: Mapping[Name, Method], rounds: int = ROUNDS) -> dict[Name, dict[str, Any]]:
    """Return by method ``wall_ms`` of eager calls and ``graph_ms`` of CUDA graph replays, or ``error`` and ``graph_error``."""
    rows = eager_times(methods, rounds)
    graphs = graph_times({name: methods[name] for name, row in rows.items() if "wall_ms" in row}, rounds)
    return {name: row | graphs.get(name, {}) for name, row in rows.items()}


def free() -> None:
    """Release unused device memory."""
    gc.collect()
    if ON_GPU:
        synchronize()
        torch.cuda.empty_cache()
