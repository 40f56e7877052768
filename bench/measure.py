"""How a time is taken: warm, synchronised, medians of rounds in which the compared methods take turns; eager and as a graph."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

Method = Callable[[], Any]
ON_GPU = torch.cuda.is_available()
ROUNDS = 9 if ON_GPU else 3
_MOST_CALLS = 10 if ON_GPU else 1
# seconds: a round of calls is about this long, where that is within 1 to _MOST_CALLS calls
_ROUND = 0.1


def synchronize() -> None:
    """Wait for the device; a timing without it measures the launch."""
    if ON_GPU:
        torch.cuda.synchronize()


def seconds(method: Method, calls: int = 1) -> float:
    """Seconds per call of `calls` calls in a row and one wait at their end, as the layers of a model run."""
    synchronize()
    start = time.perf_counter()
    for _ in range(calls):
        method()
    synchronize()
    return (time.perf_counter() - start) / calls


class DeviceLostError(SystemExit):
    """After an illegal access every further call in this process fails: the next run goes on."""


def text_of(error: BaseException) -> str:
    """An error's text, short enough for a row.

    Raises
    ------
    DeviceLostError
        If the device can no longer be used in this process.
    """
    text = f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]
    if not isinstance(error, DeviceLostError):
        try:
            synchronize()
        except Exception:
            raise DeviceLostError(f"the device is lost to this process; run the same command again. It was: {text}") from error
    return text


def captured(method: Method) -> Method:
    """The method as a CUDA graph: a function that replays it. It must have run before, or its compilation would be captured."""
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


def interleaved(methods: Mapping[str, Method], rounds: int = ROUNDS) -> dict[str, float | str]:
    """Median milliseconds per call of each method, or the error that it raised.

    Every method is warmed by two calls. Then, round by round, each takes its turn, so that a slow spell of the machine falls on
    all of them.
    """
    found: dict[str, float | str] = {}
    calls: dict[str, int] = {}
    for name, method in methods.items():
        try:
            seconds(method)
            calls[name] = min(_MOST_CALLS, max(1, int(_ROUND / seconds(method))))
        except Exception as error:
            found[name] = text_of(error)
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name in times:
            times[name].append(seconds(methods[name], calls[name]))
    return found | {name: 1e3 * statistics.median(taken) for name, taken in times.items()}


def wall_and_graph(methods: Mapping[str, Method], rounds: int = ROUNDS) -> dict[str, dict[str, Any]]:
    """By method: ``wall_ms`` of plain calls and ``graph_ms`` of CUDA graph replays, or ``error`` and ``graph_error``."""
    wall = interleaved(methods, rounds)
    rows: dict[str, dict[str, Any]] = {
        name: {"error": value} if isinstance(value, str) else {"wall_ms": value} for name, value in wall.items()
    }
    if not ON_GPU:
        return rows
    graphs: dict[str, Method] = {}
    for name, row in rows.items():
        if "wall_ms" not in row:
            continue
        try:
            graphs[name] = captured(methods[name])
        except Exception as error:
            row["graph_error"] = text_of(error)
            synchronize()
    for name, value in interleaved(graphs, rounds).items():
        rows[name]["graph_error" if isinstance(value, str) else "graph_ms"] = value
    graphs.clear()
    free()
    return rows


def peak_bytes(method: Method) -> tuple[int, int]:
    """Peak of device memory during a call beyond what was there before, and how much of it the result holds.

    The method must be compiled and warm.
    """
    free()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    result = method()
    synchronize()
    peak, after = torch.cuda.max_memory_allocated() - before, torch.cuda.memory_allocated() - before
    del result
    return peak, after


def free() -> None:
    """Give unused device memory back."""
    gc.collect()
    if ON_GPU:
        synchronize()
        torch.cuda.empty_cache()
