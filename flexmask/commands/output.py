"""Results on stdout, as text or as one JSON document; progress and remarks on stderr."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

_WIDE = 10_000
Advance = Callable[[int, int], None]  # done, total


class Output:
    """The two streams of one command."""

    def __init__(self, as_json: bool = False) -> None:
        self.as_json = as_json
        # lines in a log or a pipe are not folded
        self._out = Console(soft_wrap=True, highlight=False, emoji=False, width=None if sys.stdout.isatty() else _WIDE)
        self._err = Console(stderr=True, soft_wrap=True, highlight=False, emoji=False)

    def line(self, *texts: str) -> None:
        """Print lines of the result, an empty one without a text; nothing with JSON."""
        if not self.as_json:
            self._out.print("\n".join(texts), markup=False)

    def table(self, columns: Sequence[str], rows: Sequence[Sequence[Any]], title: str | None = None) -> None:
        """Print a table of the result; nothing with JSON."""
        if self.as_json:
            return
        if title:
            # rich folds a table's title to its width
            self.line(title)
        # a Text shows markup as it is
        table = Table(box=None, pad_edge=False, header_style="bold")
        for index, name in enumerate(columns):
            values = [row[index] for row in rows if row[index] not in ("", None)]
            is_numeric = bool(values) and all(isinstance(cell, (int, float)) or cell.endswith("%") for cell in values)
            table.add_column(Text(name), justify="right" if is_numeric else "left", overflow="fold")
        for row in rows:
            cells = ("" if cell is None else f"{cell:.4g}" if isinstance(cell, float) else str(cell) for cell in row)
            table.add_row(*map(Text, cells))
        self._out.print(table, soft_wrap=False)

    def remark(self, text: str) -> None:
        """Print one line on stderr, with JSON too."""
        self._err.print(text, markup=False)

    def result(self, document: dict[str, Any]) -> None:
        """Print the result as a JSON document, if requested; NaN and infinity become null."""
        if self.as_json:
            from flexmask.integrations.record.calls import finite

            print(json.dumps(finite(document), indent=2, default=str))

    @contextlib.contextmanager
    def progress(self, what: str) -> Iterator[Advance]:
        """Progress on stderr: a bar, or lines by tenths in a log; nothing with JSON. Yields a function that sets the count."""
        if not self.as_json and not self._err.is_terminal:
            self.remark(what)
            tenths = 0

            def advance(done: int, total: int) -> None:
                nonlocal tenths
                if 10 * done // max(total, 1) > tenths:
                    tenths = 10 * done // max(total, 1)
                    self.remark(f"{what}: {done} of {total}")

            yield advance
            return
        columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn())
        with Progress(*columns, TimeElapsedColumn(), console=self._err, transient=True, disable=self.as_json) as bar:
            task = bar.add_task(what, total=None)
            yield lambda done, total: bar.update(task, completed=done, total=total)
