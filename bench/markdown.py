"""What the report's sections are made of: a device's rows and plots, tables, numbers and labels."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from bench.prompts import floor_of, named_density
from bench.rows import Row, slug

Parts = dict[str, list[Row]]


class Device:
    """One device's rows, and where its plots go."""

    def __init__(self, name: str, parts: Parts, folder: Path, out: Path) -> None:
        self.name, self.parts, self.folder, self.out = name, parts, folder, out

    def rows(self, *parts: str) -> list[Row]:
        """All rows of some parts."""
        return [row for part in parts for row in self.parts.get(part, [])]

    def picture(self, name: str) -> Path:
        """The file of a plot."""
        return self.folder / f"{slug(self.name)}-{name}.png"

    def shown(self, name: str) -> list[str]:
        """The lines that show a plot."""
        path = self.picture(name).resolve()
        return ["", f"![{name}, {self.name}]({Path(os.path.relpath(path, self.out.resolve().parent)).as_posix()})", ""]


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """A table in markdown."""
    return ["", f"| {' | '.join(head)} |", "|" + "---|" * len(head), *(f"| {' | '.join(row)} |" for row in rows), ""]


def ms(value: object) -> str:
    """Milliseconds with three digits, or a dash."""
    return (
        f"{value:,.3g}"
        if isinstance(value, (int, float)) and value < 1000
        else f"{value:,.0f}"
        if isinstance(value, float)
        else "-"
    )


def times(value: object) -> str:
    """A ratio, or a dash."""
    return f"{value:.2f}x" if isinstance(value, float) else "-"


def share(value: object) -> str:
    """A density, or a dash."""
    return f"{value:.3f}" if isinstance(value, (int, float)) else "-"


def label(row: Row) -> str:
    """A method with its gamma and, where it is not that of its length, its floor."""
    words = [f"FlexPrefill {row['method'][5:]}" if row["method"].startswith("call ") else row["method"]]
    if row["gamma"] is not None:
        words.append(f"gamma {row['gamma']:g}")
    if row["min_budget"] not in (None, floor_of(row["tokens"])):
        words.append(f"floor {row['min_budget']}")
    return ", ".join(words)


def is_main(row: Row) -> bool:
    """Whether the row is of the mixture at the density that targets are stated at."""
    return bool(row["input"] == "mixture" and row["named_density"] == named_density(row["tokens"]))
