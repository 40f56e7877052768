"""Joins the results of all devices into ``bench/REPORT.md`` with plots; needs no GPU: ``python -m bench.report``."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from bench.cost_sections import compile_section, errors_section, inputs_section, memory_section, stages_section
from bench.markdown import Device
from bench.rows import FOLDER
from bench.timing_sections import break_even_section, growth_section, latency_section, published_section, targets_section

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
    """The report's text; plots go beside the results."""
    lines = [
        "# Benchmarks",
        "",
        "Made by `make bench-report` from `bench/results/`; `bench/README.md` says what is measured and how.",
        "",
    ]
    for path in sorted(results.glob("*.json")):
        found = json.loads(path.read_text(encoding="utf-8"))
        device = Device(found["device"], found["parts"], results, out)
        every = [row for rows in device.parts.values() for row in rows]
        versions = ", ".join(sorted({row["torch"] for row in every}))
        dates = sorted({row["date"] for row in every})
        lines += [f"## {device.name}", "", f"torch {versions}; {dates[0]} to {dates[-1]}." if dates else "Nothing measured.", ""]
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
    parser.add_argument("--results", type=Path, default=FOLDER, help="folder of the results; plots go there too")
    parser.add_argument("--out", type=Path, default=OUT, help="file to write")
    options = parser.parse_args(arguments)
    options.out.write_text(report(options.results, options.out), encoding="utf-8")
    print(options.out)


if __name__ == "__main__":
    main()
