"""pytest-benchmark as the harness of the short benchmark: the `timed` fixture, and one table of ratios at the end."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from bench import ON_GPU
from bench.measure.clock import MOST_CALLS, Method, every
from bench.measure.memory import peak_bytes
from bench.measure.methods import DENSE
from bench.measure.results import device_name
from bench.reporting.tables import ms, text_table, thousands, times

_ROUNDS = 10 if ON_GPU else 5
ROWS: list[dict[str, Any]] = []


@pytest.fixture
def timed(benchmark: Any) -> Callable[..., float]:
    """Return a function that times a method, compiled and warmed up beforehand, and returns the median in milliseconds.

    A round is `MOST_CALLS` calls with one wait for the device at the end, as a model runs its layers: the host launches a call
    while the device works on the one before, and shows only where it is the slower of the two.
    """

    def time(method: Method, /, **info: Any) -> float:
        with torch.no_grad():
            method()
            if ON_GPU:
                info["peak_mb"] = round(peak_bytes(method)[0] / 2**20)
            benchmark.pedantic(every(MOST_CALLS, method), rounds=_ROUNDS, iterations=MOST_CALLS, warmup_rounds=1)
        median = float(benchmark.stats.stats.median) * 1e3
        benchmark.extra_info.update(info, median_ms=median, device=device_name(), torch=torch.__version__)
        ROWS.append({**info, "ms": median})
        return median

    return time


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print every time with its ratio to dense attention at the same length in the same run."""
    if not ROWS:
        return
    dense = {row["tokens"]: row["ms"] for row in ROWS if row["method"] == DENSE}
    rows = [("tokens", "method", "ms", "dense / this", "this / dense", "density", "peak MB")]
    for row in ROWS:
        base = dense.get(row["tokens"])
        ratios = (times(base / row["ms"]), f"{row['ms'] / base:.2%}") if base else ("-", "-")
        density = f"{row['density']:.3f}" if "density" in row else "-"
        rows.append((thousands(row["tokens"]), row["method"], ms(row["ms"]), *ratios, density, str(row.get("peak_mb", "-"))))
    terminalreporter.section("ratio to dense attention of this run")
    terminalreporter.write_line(text_table(rows, "><>>>>>"))
