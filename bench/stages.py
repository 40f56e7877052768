"""Where the time of a call goes: GPU kernels by stage of the algorithm (the paper's latency breakdown)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from bench.measure import synchronize, wall_and_graph

# parts of kernel names, in the order of the algorithm; the first that fits counts
STAGES: dict[str, tuple[str, ...]] = {
    "representative scores": ("_block_sums_kernel", "_row_norms_kernel", "_lines_kernel"),
    "pattern": ("_estimate_kernel", "_pattern_kernel"),
    "index": ("_pooled_map", "_small_map", "_digit_pass", "_ties_kernel", "_chosen_kernel", "_rows_kernel"),
    "emission": ("_lists_kernel",),
    "attention": ("flex_attention", "triton_tem_", "flash", "cutlass"),
}
GLUE = "glue"
NAMES = (*STAGES, GLUE)
# block means of keys are made first, for the pattern, then those of queries, for the index
_MEANS = "_means_kernel"
_CALLS = 10
_MOST_GLUE = 12


def stage_of(name: str, means_before: int) -> str:
    """The stage of a kernel, given how many kernels of block means the call has run before."""
    if _MEANS in name:
        return "pattern" if means_before == 0 else "index"
    for stage, words in STAGES.items():
        if any(word in name for word in words):
            return stage
    return GLUE


def grouped(calls: Iterable[Iterable[tuple[str, float]]]) -> tuple[dict[str, float], dict[str, float]]:
    """Milliseconds per call by stage, and by kernel for what is glue.

    `calls` holds, for each call, its kernels in order: name and microseconds.
    """
    stages, glue = dict.fromkeys(NAMES, 0.0), dict[str, float]()
    count = 0
    for kernels in calls:
        count += 1
        means = 0
        for name, microseconds in kernels:
            stage = stage_of(name, means)
            means += _MEANS in name
            stages[stage] += microseconds / 1e3
            if stage == GLUE:
                glue[name] = glue.get(name, 0.0) + microseconds / 1e3
    heaviest = sorted(glue, key=lambda name: -glue[name])
    return (
        {name: total / max(1, count) for name, total in stages.items()},
        {name: glue[name] / max(1, count) for name in heaviest},
    )


def stage_fields(method: Callable[[], Any]) -> dict[str, Any]:
    """Fields of a row: times by stage, the heaviest kernels without a stage, and the whole call by wall clock and by graph."""
    times = wall_and_graph({"": method})[""]
    if "error" in times:
        return times
    # the first profile sets the profiler up
    calls = [kernels_of(method) for _ in range(1 + _CALLS)][1:]
    stages, glue = grouped(calls)
    for name, milliseconds in list(glue.items())[:_MOST_GLUE]:
        print(f"    no stage: {milliseconds:.4f} ms {name[:100]}", flush=True)
    shown = {name[:100]: round(milliseconds, 5) for name, milliseconds in list(glue.items())[:_MOST_GLUE]}
    kernels = [len(call) for call in calls]
    return times | {"stages_ms": stages, "glue_kernels_ms": shown, "kernels": max(kernels), "kernel_ms": sum(stages.values())}


def kernels_of(method: Callable[[], Any]) -> list[tuple[str, float]]:
    """The kernels of one call in order: name and microseconds."""
    synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        method()
        synchronize()
    events = [event for event in profile.events() or [] if str(event.device_type).endswith("CUDA")]
    events.sort(key=lambda event: event.time_range.start)
    return [(event.name, float(event.time_range.elapsed_us())) for event in events]
