"""GPU kernel time of a call by stage of the algorithm, after the paper's latency breakdown."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from bench.measure.clock import eager_and_graph_times, synchronize

# parts of kernel names, in the order of the algorithm; the first match counts. The stages' names are keys of the results.
STAGES: dict[str, tuple[str, ...]] = {
    "representative scores": ("_block_sums_kernel", "_row_norms_kernel", "_lines_kernel"),
    "pattern": ("_estimate_kernel", "_pattern_kernel"),
    "index": ("_pooled_map", "_small_map", "_digit_pass", "_ties_kernel", "_chosen_kernel", "_rows_kernel", "_evidence_kernel"),
    "emission": ("_lists_kernel",),
    "attention": ("flex_attention", "triton_tem_", "flash", "cutlass"),
}
GLUE = "glue"
NAMES = (*STAGES, GLUE)
# a call averages the keys of each block first, for the pattern, then the queries, for the index
_MEANS = "_means_kernel"
_CALLS = 10
_MOST_GLUE = 12


def stage_of(name: str, means_before: int) -> str:
    """Return a kernel's stage; `means_before` counts the block means that the call has computed so far."""
    if _MEANS in name:
        return "pattern" if means_before == 0 else "index"
    for stage, words in STAGES.items():
        if any(word in name for word in words):
            return stage
    return GLUE


def grouped(calls: Iterable[Iterable[tuple[str, float]]]) -> tuple[dict[str, float], dict[str, float]]:
    """Return milliseconds per call by stage, and by kernel for those without a stage, heaviest first.

    `calls` holds each call's kernels in launch order: name and microseconds.
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
    """Return times by stage, the heaviest kernels without a stage, and eager and graph times, as fields of a row."""
    times = eager_and_graph_times({"": method})[""]
    if "error" in times:
        return times
    # the first profile includes setting up the profiler
    calls = [kernels_of(method) for _ in range(1 + _CALLS)][1:]
    stages, glue = grouped(calls)
    heaviest = list(glue.items())[:_MOST_GLUE]
    for name, milliseconds in heaviest:
        print(f"    no stage: {milliseconds:.4f} ms {name[:100]}", flush=True)
    shown = {name[:100]: round(milliseconds, 5) for name, milliseconds in heaviest}
    kernels = max(len(call) for call in calls)
    return times | {"stages_ms": stages, "glue_kernels_ms": shown, "kernels": kernels, "kernel_ms": sum(stages.values())}


def kernels_of(method: Callable[[], Any]) -> list[tuple[str, float]]:
    """Profile one call and return its kernels in launch order: name and microseconds."""
    synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        method()
        synchronize()
    events = [event for event in profile.events() or [] if str(event.device_type).endswith("CUDA")]
    events.sort(key=lambda event: event.time_range.start)
    return [(event.name, float(event.time_range.elapsed_us())) for event in events]
