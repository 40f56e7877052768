"""Write the reports: ``python -m bench.report``, or ``make bench-report``.

In the documents of `FILLED` it replaces the lines between ``<!-- table: NAME -->`` and ``<!-- end -->``, and draws the figures
into ``bench/results/``.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from bench.report import (
    ablations,
    answers,
    fidelity,
    first_page,
    first_token,
    gamma,
    greedy,
    leaderboard,
    should_i_use_it,
    speed,
    trained,
)
from bench.report.rows import FOLDER

ROOT = Path(__file__).parents[2]
FILLED = (
    "README.md",
    "docs/serving.md",
    "docs/serving-measurements.md",
    "bench/FIDELITY.md",
    "bench/archive/EARLIER.md",
    "bench/HYBRID_ABLATIONS.md",
    "bench/REPORT.md",
    "bench/LEADERBOARD.md",
    "docs/should-i-use-it.md",
)
TABLES: dict[str, Callable[[Path], list[str]]] = {
    **fidelity.TABLES,
    **speed.TABLES,
    **leaderboard.TABLES,
    **should_i_use_it.TABLES,
    **first_token.TABLES,
    **trained.TABLES,
    **answers.TABLES,
    **ablations.TABLES,
    **first_page.TABLES,
    **gamma.TABLES,
    **greedy.TABLES,
}
FIGURES: dict[str, Callable[..., None]] = {
    "fidelity-by-density": fidelity.draw_by_density,
    "fidelity-trained": partial(fidelity.draw_by_density, length=32768, yarn=1, model=trained.NAME),
    "gain-and-price": first_page.draw_gain_and_price,
    "gamma": gamma.draw,
    "speed-calls": speed.draw_calls,
}
_MARKED = re.compile(r"(<!-- table: (?P<name>[\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def filled(text: str, folder: Path) -> str:
    """Fill the marked places of a document; KeyError for an unknown table."""
    return _MARKED.sub(lambda found: found[1] + "\n".join(TABLES[found["name"]](folder)) + "\n" + found[3], text)


def main(arguments: Sequence[str] | None = None) -> None:
    """Draw the figures, fill in the tables."""
    from matplotlib.figure import Figure

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=FOLDER, help="folder of the rows")
    options = parser.parse_args(arguments)
    for name, draw in FIGURES.items():
        figure, path = Figure(figsize=(7.2, 4.4), dpi=110, layout="constrained"), FOLDER / f"{name}.png"
        draw(figure.subplots(), options.results)
        figure.savefig(path)
        print(path)
    for name in FILLED:
        path = ROOT / name
        path.write_text(filled(path.read_text(encoding="utf-8"), options.results), encoding="utf-8")
        print(path)


if __name__ == "__main__":
    main()
