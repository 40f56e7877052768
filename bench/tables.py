"""Tables as text."""

from __future__ import annotations

from collections.abc import Sequence


def text_table(rows: Sequence[Sequence[str]], align: str) -> str:
    """Align columns; `align` has "<" or ">" for each."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(align))]
    lines = []
    for row in rows:
        cells = [f"{cell:{side}{width}}" for cell, side, width in zip(row, align, widths, strict=True)]
        lines.append("   ".join(cells).rstrip())
    return "\n".join(lines)


def markdown_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a Markdown table, with blank lines around it."""
    return ["", f"| {' | '.join(head)} |", "|" + "---|" * len(head), *(f"| {' | '.join(row)} |" for row in rows), ""]


def thousands(tokens: float) -> str:
    """A length as ``128k`` or ``1M``."""
    if tokens < 1024 or tokens % 1024:
        return f"{tokens:,.0f}"
    return f"{tokens / 2**20:g}M" if tokens >= 2**20 else f"{tokens / 1024:g}k"
