"""Measured rows: ``bench/results/fidelity-<device>.jsonl`` and files next to it, one line for each method and text or task."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from bench.fidelity.texts import NUM_TOKENS
from bench.measure.rows import read_rows

PATH = Path(__file__).parents[1] / "results" / "fidelity-nvidia-h200.jsonl"
TEXT_FIGURES = ("density", "dloss", "absd")
BEDS = ("texts", "needles", "tasks", "attention", "patterns", "chunks", "tuned")
# methods whose figures by head are kept
HEADS = (
    *("hybrid:gamma=0.9", "coverage:gamma=0.9", "published:gamma=0.9", "xattention:threshold=0.9"),
    *("flash_prefill:alpha=0.05", "oracle:gamma=0.9", "streaming_llm:sink_blocks=1,window_blocks=16"),
)
_KEPT = (
    *("bed", "method", "text", "task", "density", "dloss", "absd", "loss", "loss_quarters", "right", "n", "parts", "uncompiled"),
    *("answer_tokens", "first", "each"),
    *("mass", "mass_quarters", "worst_mass", "worst_head", "output_error"),
)
_DIGITS = 5


@dataclass
class Results:
    """Rows by method.

    Attributes
    ----------
    texts
        ``texts[method][text]`` is (density, change of the loss, mean absolute change of a log-probability).
    needles
        ``needles[method][task]`` is (density, right answers, prompts).
    """

    texts: dict[str, dict[str, tuple[float, ...]]] = field(default_factory=dict)
    needles: dict[str, dict[str, tuple[float, int, int]]] = field(default_factory=dict)

    def on(self, method: str, texts: Iterable[str]) -> np.ndarray | None:
        """(texts, 3) figures of a method; None unless it was measured on all of them."""
        found = self.texts.get(method, {})
        texts = list(texts)
        return np.array([found[text] for text in texts]) if texts and all(text in found for text in texts) else None


def read(path: Path = PATH) -> Results:
    """The rows of a file."""
    results = Results()
    for row in rows_of(path):
        if row["bed"] == "texts" and "absd" in row:
            results.texts.setdefault(row["method"], {})[row["text"]] = tuple(row[name] for name in TEXT_FIGURES)
        elif row["bed"] == "needles":
            results.needles.setdefault(row["method"], {})[row["task"]] = (row["density"], row["right"], row["n"])
    tuned = file_of_bed("tuned", path=path)
    for row in rows_of(tuned, ("tuned",)) if tuned.exists() else []:
        results.texts.setdefault(row["method"], {})[row["text"]] = tuple(row[name] for name in TEXT_FIGURES)
    return results


def rows_of(path: Path, beds: Collection[str] = ("texts", "needles")) -> list[dict[str, Any]]:
    """Rows that hold a measurement on these beds."""
    return [row for row in read_rows(path) if row["bed"] in beds and "error" not in row]


def file_of_bed(bed: str, tokens: int | None = None, path: Path = PATH) -> Path:
    """The file of a bed's rows: `path` for whole texts and needles, one next to it for the others."""
    if bed == "needles" or (bed == "texts" and tokens in (None, NUM_TOKENS)):
        return path
    part = bed if tokens in (None, NUM_TOKENS) else f"{bed}-{tokens}"
    return path.with_name(path.name.replace("fidelity-", f"fidelity-{part}-"))


def add(files: Iterable[Path], path: Path = PATH) -> dict[Path, int]:
    """Put the rows of a run's files into `path` and the files next to it, rounded; returns how many each holds.

    A row of the same method and text or task, from the same prompt on, is replaced, unless it has fewer prompts; one without
    each prompt's answer gives way to one with them. Figures by head go, as means over the texts of these files, to the file of
    `heads_path`.
    """
    new: dict[Path, list[dict[str, Any]]] = {}
    by_head: dict[str, list[dict[str, Any]]] = {}
    for row in (row for file in files for row in rows_of(file, BEDS)):
        new.setdefault(file_of_bed(row["bed"], row.get("tokens"), path), []).append(row)
        if row["bed"] == "patterns" or (row["bed"] == "attention" and row["method"] in HEADS and "density_by_head" in row):
            by_head.setdefault(f"{row['bed']} {row['method']}", []).append(row)
    counts = {}
    for target, rows in new.items():
        merged: dict[tuple[Any, ...], dict[str, Any]] = {}
        for row in [*(rows_of(target, BEDS) if target.exists() else []), *rows]:
            key = (row["bed"], row["method"], row.get("text", row.get("task")), row.get("first", 0))
            if _worth(row) >= _worth(merged.get(key, {})):
                merged[key] = row
        lines = [json.dumps({name: _rounded(row[name]) for name in _KEPT if name in row}) for row in merged.values()]
        target.write_text("\n".join(lines) + "\n", encoding="utf-8")
        counts[target] = len(lines)
    if by_head:
        _write_heads(by_head, heads_path(path))
    return counts


def _worth(row: dict[str, Any]) -> tuple[bool, int]:
    """Prompts of a row, those first that are known one by one."""
    return "each" in row, row.get("n", 0)


def heads_path(path: Path = PATH) -> Path:
    """The file of figures by layer and head."""
    return path.with_name(path.name.replace("fidelity-", "fidelity-heads-")).with_suffix(".json")


def _write_heads(by_head: dict[str, list[dict[str, Any]]], path: Path) -> None:
    """Means over texts of every figure by layer and head."""
    found = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    for name, rows in by_head.items():
        figures = [figure for figure, value in rows[0].items() if isinstance(value, list) and isinstance(value[0], list)]
        means = {figure: np.round(np.mean([row[figure] for row in rows], 0), 4).tolist() for figure in figures}
        found[name] = {"texts": len({row["text"] for row in rows}), **means}
    path.write_text(
        "{\n" + ",\n".join(f"{json.dumps(name)}: {json.dumps(each)}" for name, each in found.items()) + "\n}\n", "utf-8"
    )


def _rounded(value: Any) -> Any:
    if isinstance(value, list):
        return [_rounded(each) for each in value]
    return round(value, _DIGITS) if isinstance(value, float) else value
