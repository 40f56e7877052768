"""Files of measured rows, written row by row, so an interrupted run can resume."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

Row = dict[str, Any]


def append_line(path: Path, line: str) -> None:
    """Append a line; replaces an incomplete last line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab+") as file:
        size = file.tell()
        file.seek(max(0, size - 1))
        if size and file.read(1) != b"\n":
            file.truncate(path.read_bytes().rfind(b"\n") + 1)
        file.write(line.encode() + b"\n")


def whole_lines(path: Path) -> list[str]:
    """Complete lines of a file; none if it does not exist."""
    return path.read_text(encoding="utf-8").split("\n")[:-1] if path.exists() else []


def append_row(path: Path, row: Row) -> None:
    append_line(path, json.dumps(row))


def read_rows(path: Path) -> list[Row]:
    return [json.loads(line) for line in whole_lines(path) if line]


class Sheet:
    """Rows of a CSV file, which need not exist. `identity` lists the columns that identify a row."""

    def __init__(self, path: Path, columns: Sequence[str], identity: Sequence[str]) -> None:
        self.path, self.columns, self.identity = path, tuple(columns), tuple(identity)
        head, *lines = whole_lines(path) or [",".join(columns)]
        if head != ",".join(columns):
            raise ValueError(f"{path} must have the columns {', '.join(columns)}; got {head}")
        self._known = {self._key(row) for row in csv.DictReader(lines, fieldnames=self.columns)}

    def has(self, **row: Any) -> bool:
        """True if a row has the same identity."""
        return self._key(row) in self._known

    def add(self, **row: Any) -> None:
        """Append a row; missing columns stay empty."""
        unknown = [name for name in row if name not in self.columns]
        if unknown:
            raise ValueError(f"a row must have some of the columns {', '.join(self.columns)}; got {unknown[0]}")
        if not self.path.exists():
            append_line(self.path, ",".join(self.columns))
        line = io.StringIO()
        csv.writer(line, lineterminator="").writerow([as_text(row.get(name)) for name in self.columns])
        append_line(self.path, line.getvalue())
        self._known.add(self._key(row))

    def _key(self, row: Row) -> tuple[str, ...]:
        return tuple(as_text(row.get(name)) for name in self.identity)


def as_text(value: Any) -> str:
    """A value in CSV: floats with six digits, options as sorted JSON, nothing for None."""
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.6g}"
    return json.dumps(value, sort_keys=True) if isinstance(value, (dict, list, tuple)) else str(value)
