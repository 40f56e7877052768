"""Results as JSON: one file per device, rows by part, saved after every row so that a run can stop and resume anywhere."""

from __future__ import annotations

import datetime
import json
import os
import platform
import re
from pathlib import Path
from typing import Any

import torch

FOLDER = Path(__file__).parents[1] / "results"
# identifies a row within its part; a field that the row lacks counts as None
KEY = ("input", "tokens", "named_density", "aim", "gamma", "min_budget", "method")

Row = dict[str, Any]


def device_name() -> str:
    """Return the GPU's name, or the processor's."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    return f"CPU {platform.machine()}, {torch.get_num_threads()} threads"


def slug(name: str) -> str:
    """Turn a name into a file name: ``nvidia-h200``."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def key_of(row: Row) -> tuple[Any, ...]:
    """Return the row's identity."""
    return tuple(row.get(name) for name in KEY)


class Results:
    """The rows of one device in one file.

    Parameters
    ----------
    folder
        Folder of ``<device>.json``.
    again
        Also measure rows that exist, and replace them.
    """

    def __init__(self, folder: Path, again: bool = False) -> None:
        self.device = device_name()
        self.path = folder / f"{slug(self.device)}.json"
        self.again = again
        self._new: set[tuple[Any, ...]] = set()
        self.parts: dict[str, list[Row]] = {}
        if self.path.exists():
            self.parts = json.loads(self.path.read_text(encoding="utf-8"))["parts"]

    def find(self, part: str, **key: Any) -> Row | None:
        """Return the row of this key measured with this torch, or None. A row with an error counts as measured."""
        rows = [row for row in self.parts.get(part, []) if key_of(row) == key_of(key) and row["torch"] == torch.__version__]
        return rows[-1] if rows else None

    def missing(self, part: str, **key: Any) -> bool:
        """Return whether the row still has to be measured."""
        if self.again and (part, *key_of(key)) not in self._new:
            return True
        return self.find(part, **key) is None

    def add(self, part: str, row: Row) -> None:
        """Add a row, replacing an older one with the same key, and save."""
        row = {"device": self.device, "torch": torch.__version__, "date": datetime.date.today().isoformat()} | row
        rows = self.parts.setdefault(part, [])
        rows[:] = [old for old in rows if key_of(old) != key_of(row)] + [row]
        self._new.add((part, *key_of(row)))
        self._save()

    def _save(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        # one row per line, for readable diffs
        parts = []
        for part, rows in self.parts.items():
            lines = ",\n".join(f"   {json.dumps(row)}" for row in rows)
            parts.append(f"  {json.dumps(part)}: [\n{lines}\n  ]")
        text = f'{{\n "device": {json.dumps(self.device)},\n "parts": {{\n' + ",\n".join(parts) + "\n }\n}\n"
        temporary = self.path.with_suffix(".tmp")
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, self.path)
