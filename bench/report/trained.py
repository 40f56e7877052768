"""Qwen2.5-Coder-1.5B-Instruct: first tokens in vLLM 0.26, error on texts, and RULER's tasks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pandas as pd

from bench.intervals import of_mean
from bench.report.fidelity import OTHERS, hybrid_at, language_model, mean_of
from bench.report.first_token import vllm_prefills
from bench.report.rows import ERROR, FOLDER, Curves, interval, number, percent
from bench.rows import read_rows
from bench.tables import markdown_table, thousands

NAME = "Qwen2.5-Coder-1.5B-Instruct"
CHUNKS = "chunks, YaRN 4"  # a run
_YARN = {16384: 1, 32768: 1, 65536: 4, 131072: 4}  # YaRN's factor by prompt tokens
_RULER = ("hybrid, gamma 0.9", "hybrid, gamma 0.95", "flexprefill, gamma 0.9")


def first_tokens(folder: Path = FOLDER, method: str = "hybrid") -> pd.DataFrame:
    """Mean seconds over four texts, dense and with the default floor, by prompt tokens."""
    return pd.concat([vllm_prefills(folder, method, model=NAME, run=run) for run in ("texts", "texts, YaRN 4")])


def _own(rows: pd.DataFrame, gamma: float, floor: float) -> pd.DataFrame:
    return hybrid_at(rows, f'{{"gamma": {gamma}, "min_coverage": {floor}}}')


def _named(tokens: int) -> str:
    return thousands(tokens) + (f", YaRN {_YARN[tokens]}" if _YARN[tokens] > 1 else "")


def _texts(tokens: int, folder: Path) -> pd.DataFrame:
    return language_model(tokens, folder, yarn=_YARN[tokens], model=NAME)


def _without_floor(rows: pd.DataFrame) -> pd.DataFrame:
    return rows[~rows["options"].str.contains('"min_coverage": 0.5')]


def settings(folder: Path = FOLDER) -> list[str]:
    """Hybrid by gamma and floor beside the others at as many blocks."""
    cells = []
    for tokens in _YARN:
        rows = _texts(tokens, folder)
        without_floor = _without_floor(rows)
        curves = Curves(without_floor) if len(without_floor) else None
        for gamma, floor in ((0.85, 0.0), (0.9, 0.0), (0.9, 0.5), (0.95, 0.0), (0.95, 0.5)):
            own = _own(rows, gamma, floor)
            if own.empty:
                continue
            density = own["density"].mean()
            others = [number(curves.error_at(other, density)) if curves else "-" for other in OTHERS]
            lost = [mean_of(own, "abs_d", ".3f"), mean_of(own, "d_loss", "+.3f")]
            cells.append([_named(tokens), f"{gamma:g}", f"{floor:g}", percent(density), *lost, *others])
    head = ["tokens", "gamma", "`min_coverage`", "density", ERROR, "change of the loss"]
    return markdown_table([*head, *(f"{other}'s {ERROR} at this density" for other in OTHERS)], cells)


def methods(folder: Path = FOLDER) -> list[str]:
    """Errors at equal density, of two models and lengths."""
    cells = []
    for model, yarn, tokens, density in ((NAME, 1, 32768, 0.2), (NAME, 4, 65536, 0.22), ("SmolLM2-135M", 8, 65536, 0.12)):
        curves = Curves(_without_floor(language_model(tokens, folder, yarn=yarn, model=model)))
        place = f"{model.removesuffix('-Instruct')}, {thousands(tokens)}{f', YaRN {yarn}' if yarn > 1 else ''}"
        read = [(curves.error_at(each, density), *curves.interval_at(each, density)) for each in ("hybrid", *OTHERS)]
        errors = [number(error) + interval(low, high) for error, low, high in read]
        cells.append([f"{place}, {density:.0%} of the blocks", *errors])
    return markdown_table(["error at equal density", "`hybrid`", *(f"`{other}`" for other in OTHERS)], cells)


def scores(length: int, folder: Path = FOLDER) -> pd.DataFrame:
    """Scores of prompts of a length, 0 to 100, by task and index, a column per method."""
    rows = pd.DataFrame(read_rows(folder / "ruler-vllm-h100.jsonl")[1:])
    return 100 * rows[rows["length"] == length].pivot_table(index=["task", "index"], columns="method", values="score")


def tasks(length: int, folder: Path = FOLDER) -> list[str]:
    """RULER's tasks: dense scores, and what each method changes on the same prompts."""
    cells, found = [], scores(length, folder)
    methods = [method for method in _RULER if method in found]
    for task, own in found.groupby(level="task"):
        changes = []
        for method in methods:
            change = (own[method] - own["dense"]).dropna()
            changes.append(f"{change.mean():+.1f}{interval(*of_mean(list(change)), '+.1f')}" if len(change) else "-")
        cells.append([f"`{task}`", f"{own['dense'].mean():.1f}", *changes])
    return markdown_table(["task", "dense", *methods], cells)


def _chunked(folder: Path) -> dict[int | None, pd.DataFrame]:
    """First tokens by size of the chunks, None for whole prompts, all with YaRN."""
    return {size: vllm_prefills(folder, "hybrid", model=NAME, run=CHUNKS, chunk=size) for size in (None, 32768, 8192)}


def chunks(folder: Path = FOLDER) -> list[str]:
    """First tokens of whole prompts, and ratios to dense attention in as large chunks."""
    whole, chunked = first_tokens(folder), _chunked(folder)
    ratios = pd.DataFrame({size: chunked[size]["ratio"] for size in (32768, 8192)}).reindex(_YARN)
    cells = [
        [_named(tokens), f"{row['dense']:.3f} s", f"{row['sparse']:.3f} s", number(row["ratio"]), percent(row["density"]),
         *(number(ratio) for ratio in ratios.loc[tokens])]
        for tokens, row in whole.iterrows()
    ]  # fmt: skip
    head = ["prompt", "dense, whole", "flexmask, whole", "speedup", "blocks kept", "speedup, chunks of 32k", "chunks of 8k"]
    return markdown_table(head, cells)


TABLES: dict[str, Callable[[Path], list[str]]] = {
    "trained-settings": settings,
    "trained-chunks": chunks,
    "trained-methods": methods,
    **{f"trained-tasks-{thousands(length)}": partial(tasks, length) for length in (32768, 65536, 131072)},
}
