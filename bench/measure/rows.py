"""JSON lines: rows are added as they are measured, so a run that is cut off loses nothing and the next goes on from there."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import flexmask

Row = dict[str, Any]


def read_rows(paths: Path | Iterable[Path]) -> list[Row]:
    """All rows of these files, in order. A last line that a run was cut off in the middle of is left out."""
    found: list[Row] = []
    for path in [paths] if isinstance(paths, Path) else paths:
        lines = path.read_text(encoding="utf-8").split("\n")
        for number, line in enumerate(lines):
            if not line:
                continue
            try:
                found.append(json.loads(line))
            except json.JSONDecodeError:
                if number + 1 < len(lines):  # the end of line is written with the row
                    raise
    return found


def append_row(path: Path, row: Row) -> None:
    """Add a row to a file, at once, in place of what a run that was cut off had written of one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab+") as file:
        size = file.tell()
        file.seek(max(0, size - 1))
        if size and file.read(1) != b"\n":
            file.truncate(path.read_bytes().rfind(b"\n") + 1)
        file.write(json.dumps(row).encode() + b"\n")


class RowLog:
    """The rows of one file; a file that is not there has none.

    Parameters
    ----------
    path
        The file. None keeps the rows in memory.
    identity
        Fields that tell one row from another; a field that a row lacks counts as None.
    """

    def __init__(self, path: Path | None, identity: Sequence[str]) -> None:
        self.path = path
        self.identity = tuple(identity)
        self.rows = read_rows(path) if path is not None and path.exists() else []
        self._known = {self.key(row) for row in self.rows}

    def key(self, row: Row) -> tuple[Any, ...]:
        """The row's values of the fields of `identity`."""
        return tuple(row.get(name) for name in self.identity)

    def has(self, **row: Any) -> bool:
        """Tell whether there is a row of the same identity."""
        return self.key(row) in self._known

    def add(self, **row: Any) -> None:
        """Append a row, at once."""
        self.rows.append(row)
        self._known.add(self.key(row))
        if self.path is not None:
            append_row(self.path, row)


def code_digest() -> str:
    """Twelve hex digits of the library's code: the same tree has the same ones, with and without git."""
    root = Path(flexmask.__file__).parent
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:12]
