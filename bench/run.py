"""One run of a part: its clock, what is still to measure, and what is left for the next run."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from bench.measure import DeviceLostError, free, text_of
from bench.rows import Results, Row

# fields of a row that are printed
SHOWN = (
    *("method", "gamma", "density", "wall_ms", "graph_ms", "ratio", "graph_ratio"),
    *("peak_mb", "extra_mb", "error", "graph_error"),
)


@dataclass
class Run:
    """One run of a part: its results, its clock, and what it leaves for the next run."""

    part: str
    results: Results
    limit: float  # seconds
    start: float = field(default_factory=time.perf_counter)
    longest: float = 0.0
    left: int = 0

    def elapsed(self) -> float:
        """Seconds so far."""
        return time.perf_counter() - self.start

    def has_time(self) -> bool:
        """Whether another step fits, if it takes no longer than the longest so far."""
        return self.elapsed() + self.longest <= self.limit

    def say(self, line: str) -> None:
        """Print with the time so far."""
        print(f"[{self.elapsed():5.0f} s] {line}", flush=True)

    def step(self, what: str, keys: Sequence[Row], work: Callable[[list[Row]], None]) -> None:
        """Do `work` on the rows of `keys` that are missing, if there is time; what it raises goes into those rows."""
        missing = [key for key in keys if self.results.missing(self.part, **key)]
        if not missing:
            return
        if not self.has_time():
            self.left += len(missing)
            return
        self.say(what)
        begin = time.perf_counter()
        try:
            work(missing)
        except (Exception, DeviceLostError) as error:
            for key in missing:
                if self.results.missing(self.part, **key):
                    self.add(key | {"error": text_of(error)})
            if isinstance(error, DeviceLostError):
                raise
        free()
        self.longest = max(self.longest, time.perf_counter() - begin)

    def add(self, row: Row) -> None:
        """Save a row and print what it says."""
        self.results.add(self.part, row)
        found = {name: row[name] for name in SHOWN if name in row}
        shown = (f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}" for name, value in found.items())
        self.say("  " + ", ".join(shown))
