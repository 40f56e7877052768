"""Curves of `bench.fidelity.attention`: ``python -m bench.fidelity.attention_report FILE.jsonl --out FOLDER``.

Writes ``attention.md`` (a table with intervals over texts, and the area under each method's curve), ``attention.csv`` (the means)
and ``attention.png`` (output error against density, six methods at most).
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bench.fidelity import statistics
from bench.fidelity.compare import AREA
from bench.fidelity.curves import CURVES, NAMES, OTHERS, between, short, shown_name
from bench.fidelity.measures import Rows, common_texts, read_rows
from bench.reporting.tables import markdown_table
from flexmask.plot import plot_frontier

FIGURES = ("density", "mass", "worst_mass", "output_error")
DENSITY, ERROR = 0, 3
DRAWN = ("hybrid", "coverage", "xattention", "flash_prefill", "streaming_llm", "oracle")


def area(density: np.ndarray, error: np.ndarray, low: float = AREA[0], high: float = AREA[1]) -> float | None:
    """Mean of the error over the densities from `low` to `high`, linear in the logarithm between settings; None out of reach."""
    order = density.argsort()
    density, error = density[order], error[order]
    if len(density) < 2 or density[0] > low or density[-1] < high:
        return None
    at = np.linspace(low, high, 21)
    return float(np.exp(np.interp(at, density, np.log(np.maximum(error, 1e-9)))).mean())


def report(rows: Rows) -> tuple[list[str], list[list[Any]], dict[str, list[tuple[float, float]]]]:
    """The lines of the report, the rows of the CSV, and the points of each method's curve."""
    if not rows:
        raise SystemExit("the files must hold rows of bench.fidelity.attention; got none")
    texts = common_texts(rows)
    rows = {name: by_text for name, by_text in rows.items() if set(texts) <= set(by_text)}
    weights = statistics.bootstrap_weights(texts)
    table, sheet, curves = [], [], {}
    for name, settings in {**CURVES, **{other: [other] for other in OTHERS}}.items():
        measured = [setting for setting in settings if setting in rows]
        points = []
        for setting in measured:
            figures = np.array([[rows[setting][text][figure] for figure in FIGURES] for text in texts])
            draws = weights @ figures
            quarters = np.mean([rows[setting][text]["mass_quarters"] for text in texts], 0)
            cells = [f"{short(draws[0, at])} {between(*statistics.interval(draws[1:, at]))}" for at in range(len(FIGURES))]
            table.append([shown_name(setting), *cells, " ".join(short(each) for each in quarters)])
            sheet.append([setting, *(round(float(each), 5) for each in (*draws[0], *quarters))])
            points.append((float(draws[0, DENSITY]), float(draws[0, ERROR])))
        if measured and name in CURVES:
            curves[name] = sorted(points)
    head = ("method", "density", "attention kept", "by the head that keeps least", "output error", "attention kept by quarter")
    lines = [f"{len(texts)} texts; intervals are 95%, over files.", *markdown_table(head, table)]
    areas = {name: area(*np.array(points).T) for name, points in curves.items() if len(points) > 1}
    ranked = sorted((found, name) for name, found in areas.items() if found is not None)
    lines += [f"Output error, mean over densities of {AREA[0]:g} to {AREA[1]:g}, of methods whose settings reach both ends:"]
    lines += markdown_table(("method", "output error"), [(NAMES[name], short(found)) for found, name in ranked])
    return lines, sheet, curves


def draw(curves: dict[str, list[tuple[float, float]]], path: Path) -> None:
    """Output error over density, logarithmic."""
    chosen = {NAMES[name]: curves[name] for name in DRAWN if name in curves}
    axes = plot_frontier(chosen, error="output error: ||o - o_dense|| / ||o_dense||", log=True)
    figure = axes.get_figure(root=True)
    assert figure is not None
    figure.savefig(path, dpi=110, bbox_inches="tight")


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the three files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", type=Path, nargs="+", help="files of bench.fidelity.attention")
    parser.add_argument("--out", type=Path, required=True, help="folder")
    options = parser.parse_args(arguments)
    lines, sheet, curves = report(read_rows(options.rows, "attention"))
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "attention.md").write_text("\n".join(lines).rstrip() + "\n", encoding="utf-8")
    with (options.out / "attention.csv").open("w", encoding="utf-8", newline="") as file:
        quarters = [f"mass_quarter_{number}" for number in range(1, 5)]
        csv.writer(file).writerows([["method", *FIGURES, *quarters], *sheet])
    draw(curves, options.out / "attention.png")
    print(options.out / "attention.md")


if __name__ == "__main__":
    main()
