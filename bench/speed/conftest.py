"""The short benchmark's `timed` fixture and table."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from bench import ON_GPU
from bench.speed.clock import MAX_CALLS, Call, device_name, synchronize
from bench.tables import text_table, thousands

_ROUNDS = 10 if ON_GPU else 5
ROWS: list[dict[str, Any]] = []


@pytest.fixture
def timed(benchmark: Any) -> Callable[..., None]:
    """A function that times a warm call; a round is `MAX_CALLS` calls with one wait at the end."""

    def time(call: Call, /, **info: Any) -> None:
        made = 0

        def each() -> None:
            nonlocal made
            call()
            made += 1
            if made % MAX_CALLS == 0:
                synchronize()

        with torch.no_grad():
            benchmark.pedantic(each, rounds=_ROUNDS, iterations=MAX_CALLS, warmup_rounds=1)
        median = float(benchmark.stats.stats.median) * 1e3
        benchmark.extra_info.update(info, median_ms=median, device=device_name(), torch=torch.__version__)
        ROWS.append({**info, "ms": median})

    return time


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print times and ratios to the run's fastest dense kernel."""
    if not ROWS:
        return
    rows = [("tokens", "what", "density", "ms", "fastest dense / this")]
    for row in ROWS:
        dense = [each["ms"] for each in ROWS if each["tokens"] == row["tokens"] and each["what"].startswith("dense")]
        ratio = f"{min(dense) / row['ms']:.2f}x" if dense else "-"
        density = f"{row['density']:.1%}" if "density" in row else "-"
        rows.append((thousands(row["tokens"]), row["what"], density, f"{row['ms']:,.3g}", ratio))
    terminalreporter.section("against the fastest dense attention of this run")
    terminalreporter.write_line(text_table(rows, "><>>>"))
