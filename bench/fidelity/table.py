"""Print what ``bench.fidelity.run`` wrote: ``python -m bench.fidelity.table FILE.jsonl ...``, one line a configuration."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any


def mean(values: list[float]) -> float:
    """Their mean, NaN without any."""
    return sum(values) / len(values) if values else math.nan


def main() -> None:
    """Means over texts; the retriever's accuracy at its density."""
    found: dict[str, dict[str, Any]] = {}
    for path in sys.argv[1:]:
        for line in Path(path).read_text().splitlines():
            entry = json.loads(line)
            if "error" in entry:
                continue
            name = ("test " if entry.get("use") == "test" else "") + entry["config"]
            row = found.setdefault(name, {"texts": {}, "tasks": {}})
            if entry["bed"] == "R" and "absd" in entry:
                row["texts"][entry["text"]] = entry
            elif entry["bed"] == "N":
                row["tasks"][entry["task"]] = entry
    print("R: n density dloss absd | prose density dloss absd | python density dloss absd || N: right@density by task")
    for config, row in found.items():
        cells = []
        for kind in ("", "/prose/", "/python/"):
            some = [entry for name, entry in row["texts"].items() if kind in name]
            cells.append(" ".join(f"{mean([e[key] for e in some]):.4f}" for key in ("density", "dloss", "absd")))
        needles = " ".join(f"{e['right'] / e['n']:.2f}@{e['density']:.3f}" for e in row["tasks"].values())
        print(f"{config:58s} {len(row['texts']):2d} {' | '.join(cells)} || {needles}")


if __name__ == "__main__":
    main()
