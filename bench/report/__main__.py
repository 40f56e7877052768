"""Write the reports: ``python -m bench.report``, or ``make bench-report``.

In the documents of `FILLED` it replaces the lines between ``<!-- table: NAME -->`` or ``<!-- figure: NAME -->`` and
``<!-- end -->``. It writes all of bench/APPENDIX.md, which git ignores, and the figures in ``bench/results/``.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from pathlib import Path

from bench.report import appendix, fidelity, leaderboard, should_i_use_it, speed
from bench.report.rows import FOLDER

ROOT = Path(__file__).parents[2]
FILLED = ("README.md", "bench/FIDELITY.md", "bench/REPORT.md", "bench/LEADERBOARD.md", "docs/should-i-use-it.md")
TABLES = {**fidelity.TABLES, **speed.TABLES, **leaderboard.TABLES, **should_i_use_it.TABLES}
FIGURES = {**fidelity.FIGURES, **speed.FIGURES}
ALT_TEXTS = {
    "fidelity-by-density": "Mean change of a token's log-probability by share of blocks kept, one line per method",
    "fidelity-needles": "Share of needles missed by share of blocks kept, one line per method",
    "fidelity-by-position": "Mean change of a token's log-probability by its position at 64k tokens, one line per method",
    "fidelity-equal-error": "Speed-up over the fastest dense kernel by length, at equal error, one line per method",
    "speed-calls": "Speed-up over the fastest dense kernel by share of blocks kept, one line per length",
}
_MARKED = re.compile(r"(<!-- (?P<kind>table|figure): (?P<name>[\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def filled(text: str, folder: Path, documents: Path = ROOT) -> str:
    """Fill the marked places of a document; KeyError for an unknown table or figure. Figures are for documents of bench/."""

    def made(found: re.Match[str]) -> str:
        name = found["name"]
        if found["kind"] == "table":
            return found[1] + "\n".join(TABLES[name](folder)) + "\n" + found[4]
        picture = f"results/{name}.png"
        shown = f"\n![{ALT_TEXTS[name]}]({picture})\n\n" if (documents / "bench" / picture).exists() else ""
        return found[1] + shown + found[4]

    return _MARKED.sub(made, text)


def draw(name: str, folder: Path, out: Path) -> Path | None:
    """Draw a figure; None without rows."""
    from matplotlib.figure import Figure

    figure, path = Figure(figsize=(7.2, 4.4), dpi=110, layout="constrained"), out / "bench" / "results" / f"{name}.png"
    if not FIGURES[name](figure.subplots(), folder):
        path.unlink(missing_ok=True)
        return None
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    return path


def main(arguments: Sequence[str] | None = None) -> None:
    """Draw the figures, fill in the tables, write the appendix."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=FOLDER, help="folder of the rows")
    parser.add_argument("--documents", type=Path, default=ROOT, help="folder of the documents: the repository's root")
    options = parser.parse_args(arguments)
    for name in FIGURES:
        print(draw(name, options.results, options.documents) or f"nothing to draw for {name}")
    for name in FILLED:
        path = options.documents / name
        if path.exists():
            text = filled(path.read_text(encoding="utf-8"), options.results, options.documents)
            path.write_text(text, encoding="utf-8")
            print(path)
    path = options.documents / "bench" / "APPENDIX.md"
    path.write_text(appendix.appendix(options.results), encoding="utf-8")
    print(path)


if __name__ == "__main__":
    main()
