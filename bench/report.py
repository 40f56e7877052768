"""Write ``bench/REPORT.md`` and its pictures from the results of all devices; needs no GPU: ``python -m bench.report``."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from bench.measure.results import FOLDER
from bench.reporting.break_even import break_even_section
from bench.reporting.compile_times import compile_section
from bench.reporting.device import Device
from bench.reporting.growth import growth_section
from bench.reporting.inputs import errors_section, inputs_section
from bench.reporting.latency import latency_section
from bench.reporting.memory import memory_section
from bench.reporting.published import published_section
from bench.reporting.stages import stages_section
from bench.reporting.targets import targets_section

OUT = Path(__file__).parent / "REPORT.md"
SECTIONS = (
    targets_section,
    latency_section,
    break_even_section,
    stages_section,
    memory_section,
    compile_section,
    growth_section,
    inputs_section,
    errors_section,
)


def report(results: Path, out: Path) -> str:
    """Return the report's text; pictures go to the folder of the results."""
    lines = [
        "# Benchmarks",
        "",
        "`make bench-report` writes this file from `bench/results/`. `bench/README.md` says how to measure and how to read the "
        "figures; `bench/NOTES.md` says under which conditions they were taken.",
        "",
    ]
    for path in sorted(results.glob("*.json")):
        found = json.loads(path.read_text(encoding="utf-8"))
        device = Device(found["device"], found["parts"], results, out)
        every = [row for rows in device.parts.values() for row in rows]
        lines += [f"## {device.name}", ""]
        if every:
            dates = sorted({row["date"] for row in every})
            measured = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
            lines += [f"Measured with torch {', '.join(sorted({row['torch'] for row in every}))} on {measured}.", ""]
        else:
            lines += ["Nothing measured.", ""]
        for section in SECTIONS:
            lines += section(device)
    lines += published_section()
    text = "\n".join(lines)
    while "\n\n\n" in text:
        text = text.replace("\n\n\n", "\n\n")
    return text.rstrip() + "\n"


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--results", type=Path, default=FOLDER, help="folder of the results, where pictures go too")
    parser.add_argument("--out", type=Path, default=OUT, help="file to write")
    options = parser.parse_args(arguments)
    options.out.write_text(report(options.results, options.out), encoding="utf-8")
    print(options.out)


if __name__ == "__main__":
    main()
