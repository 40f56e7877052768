"""What the benches share: the device, synchronised timing, and one table of ratios to dense attention at the end."""

from __future__ import annotations

import platform
from collections.abc import Callable
from typing import Any

import pytest
import torch

CALLS = 10
ROWS: list[dict[str, Any]] = []


def synchronize() -> None:
    """Wait for the device; a timing without it measures the launch."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


@pytest.fixture(scope="session")
def device() -> str:
    """The device that is measured: a GPU where there is one."""
    return "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture
def timed(benchmark: Any, device: str) -> Callable[..., float]:
    """Time a function: compiled and warm before; returns the median in milliseconds.

    A round is `CALLS` calls in a row and then one wait for the device, as the layers of a model run: the host prepares a call
    while the device works on the one before. What the host takes longer than the device shows.
    """

    def time(function: Callable[[], Any], **info: Any) -> float:
        calls = 0
        in_a_round = CALLS if device == "cuda" else 1

        def call() -> None:
            nonlocal calls
            function()
            calls += 1
            if calls % in_a_round == 0:
                synchronize()

        with torch.no_grad():
            if device == "cuda":
                function()
                synchronize()
                torch.cuda.reset_peak_memory_stats()
                before = torch.cuda.memory_allocated()
                function()
                synchronize()
                info["peak_mb"] = round((torch.cuda.max_memory_allocated() - before) / 2**20)
            benchmark.pedantic(call, rounds=10 if device == "cuda" else 5, iterations=in_a_round, warmup_rounds=1)
        median = float(benchmark.stats.stats.median) * 1e3
        machine = torch.cuda.get_device_name() if device == "cuda" else platform.processor() or platform.machine()
        benchmark.extra_info.update(info, median_ms=median, device=machine, torch=torch.__version__)
        ROWS.append({**info, "ms": median})
        return median

    return time


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print every time as a ratio to dense attention at the same length in the same run."""
    if not ROWS:
        return
    terminalreporter.section("ratio to dense attention of this run")
    terminalreporter.write_line(
        f"{'tokens':>8} {'what':<34} {'ms':>10} {'dense/this':>11} {'this/dense':>11} {'density':>8} {'MB':>7}"
    )
    dense = {row["tokens"]: row["ms"] for row in ROWS if row["what"] == "dense"}
    for row in ROWS:
        base = dense.get(row["tokens"], float("nan"))
        density = f"{row['density']:.3f}" if "density" in row else ""
        terminalreporter.write_line(
            f"{row['tokens']:>8} {row['what']:<34} {row['ms']:>10.3f} {base / row['ms']:>10.2f}x {row['ms'] / base:>11.2%} "
            f"{density:>8} {row.get('peak_mb', ''):>7}"
        )
