"""A run that measures what is missing until its time is up; the same command later goes on from there."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from bench.measure.clock import DeviceLostError, free, text_of
from bench.measure.results import Results, Row

# fields of a row to print
SHOWN = (
    *("method", "gamma", "density", "wall_ms", "graph_ms", "ratio", "graph_ratio"),
    *("peak_mb", "extra_mb", "error", "graph_error"),
)


@dataclass
class ResumableRun:
    """One run of a part of the report.

    Attributes
    ----------
    part, results
        The part, and where its rows go.
    limit
        Seconds. No step starts that would overrun it, judging by the longest step so far.
    left
        Rows that this run found no time for.
    """

    part: str
    results: Results
    limit: float
    start: float = field(default_factory=time.perf_counter)
    longest: float = 0.0
    left: int = 0

    def elapsed(self) -> float:
        """Return the seconds so far."""
        return time.perf_counter() - self.start

    def has_time(self) -> bool:
        """Return whether another step fits, if it takes no longer than the longest so far."""
        return self.elapsed() + self.longest <= self.limit

    def say(self, line: str) -> None:
        """Print a line, stamped with the seconds so far."""
        print(f"[{self.elapsed():5.0f} s] {line}", flush=True)

    def step(self, title: str, keys: Sequence[Row], work: Callable[[list[Row]], None]) -> None:
        """Call `work` with those of `keys` whose rows are missing, time permitting; an error goes into the rows it left out."""
        missing = [key for key in keys if self.results.missing(self.part, **key)]
        if not missing:
            return
        if not self.has_time():
            self.left += len(missing)
            return
        self.say(title)
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
        """Save a row and print it."""
        self.results.add(self.part, row)
        found = {name: row[name] for name in SHOWN if name in row}
        shown = (f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}" for name, value in found.items())
        self.say("  " + ", ".join(shown))
