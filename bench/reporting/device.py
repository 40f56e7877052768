"""One device's rows, the files of its pictures, and the names that methods have in the report."""

from __future__ import annotations

import os
from pathlib import Path

from bench.measure.results import Row, slug
from bench.prompts.prompt import GAMMA, floor_of, named_density
from bench.reporting.plots import Line

Parts = dict[str, list[Row]]


class Device:
    """One device's rows.

    Parameters
    ----------
    name, parts
        From the device's file of results.
    folder, out
        Folder for pictures, and the report that links to them.
    """

    def __init__(self, name: str, parts: Parts, folder: Path, out: Path) -> None:
        self.name, self.parts, self.folder, self.out = name, parts, folder, out

    def rows(self, *parts: str) -> list[Row]:
        """Return all rows of some parts."""
        return [row for part in parts for row in self.parts.get(part, [])]

    def picture(self, name: str) -> Path:
        """Return the file of a picture."""
        return self.folder / f"{slug(self.name)}-{name}.png"

    def shown(self, name: str) -> list[str]:
        """Return the lines that show a picture."""
        path = self.picture(name).resolve()
        return ["", f"![{name}, {self.name}]({Path(os.path.relpath(path, self.out.resolve().parent)).as_posix()})", ""]


def label(row: Row) -> str:
    """Name a method with its gamma and, where it differs from the default for this length, its floor."""
    words = [f"FlexPrefill {row['method'][5:]}" if row["method"].startswith("call ") else row["method"]]
    if row["gamma"] is not None:
        words.append(f"gamma {row['gamma']:g}")
    if row["min_budget"] not in (None, floor_of(row["tokens"])):
        words.append(f"floor {row['min_budget']}")
    return ", ".join(words)


def on_mixture(row: Row) -> bool:
    """Return whether the row is on the mixture at the density that targets are stated at."""
    return bool(row["input"] == "mixture" and row["named_density"] == named_density(row["tokens"]))


def at_defaults(row: Row) -> bool:
    """Return whether gamma and floor, where the method has them, are those that targets are stated at."""
    return row["gamma"] in (None, GAMMA) and row["min_budget"] in (None, floor_of(row["tokens"]))


def method_lines(rows: list[Row], value: str) -> dict[str, Line]:
    """Collect by method the points (tokens, `value`) of those rows that have the value."""
    found: dict[str, Line] = {}
    for row in rows:
        if isinstance(row.get(value), (int, float)):
            found.setdefault(row["method"], []).append((row["tokens"], row[value]))
    return {name: sorted(points) for name, points in found.items()}
