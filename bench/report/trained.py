"""Qwen2.5-Coder-1.5B-Instruct: first tokens in vLLM, also beside those of random weights, error on texts, and RULER's tasks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from bench.intervals import of_mean
from bench.report import LINES
from bench.report.fidelity import OTHERS, hybrid_at, language_model, mean_of
from bench.report.first_token import sglang, vllm_h100, vllm_prefills
from bench.report.rows import ERROR, FOLDER, Curves, interval, number, percent
from bench.report.speed import times
from bench.rows import read_rows
from bench.tables import markdown_table, thousands

NAME = "Qwen2.5-Coder-1.5B-Instruct"
_YARN = {16384: 1, 32768: 1, 65536: 4, 131072: 4}  # YaRN's factor by prompt tokens
_RULER = ("hybrid, gamma 0.9", "hybrid, gamma 0.95", "flexprefill, gamma 0.9")


def first_tokens(folder: Path = FOLDER, method: str = "hybrid") -> pd.DataFrame:
    """Mean seconds over four texts, dense and with the default floor, by prompt tokens."""
    return pd.concat([vllm_prefills(folder, method, model=NAME, run=run) for run in ("texts", "texts, YaRN 4")])


def _own(rows: pd.DataFrame, gamma: float, floor: float) -> pd.DataFrame:
    return hybrid_at(rows, f'{{"gamma": {gamma}, "min_coverage": {floor}}}')


def table(folder: Path = FOLDER) -> list[str]:
    """First token, density, perplexity and RULER's mean by length."""
    cells = []
    for tokens, row in first_tokens(folder).iterrows():
        own = _own(_texts(int(tokens), folder), 0.9, 0.5)
        seconds = [f"{row['dense']:.3f} s", f"{row['sparse']:.3f} s", times(row["ratio"], 2)]
        perplexity = f"{np.expm1(own['d_loss'].mean()):+.1%}"
        cells.append([_named(int(tokens)), *seconds, percent(row["density"]), perplexity, _mean_scores(int(tokens), folder)])
    head = ["prompt", "first token, dense", "flexmask", "faster", "blocks kept", "perplexity", "RULER"]
    return markdown_table(head, cells)


def _named(tokens: int) -> str:
    return thousands(tokens) + (f", YaRN {_YARN[tokens]}" if _YARN[tokens] > 1 else "")


def _texts(tokens: int, folder: Path) -> pd.DataFrame:
    return language_model(tokens, folder, yarn=_YARN[tokens], model=NAME)


def _without_floor(rows: pd.DataFrame) -> pd.DataFrame:
    return rows[~rows["options"].str.contains('"min_coverage": 0.5')]


def _mean_scores(tokens: int, folder: Path) -> str:
    """Mean of the tasks, dense and at gamma 0.9, and the interval of the change over prompts."""
    both = scores(tokens, folder)
    if both.empty:
        return "not run"
    means = both[["dense", _RULER[0]]].mean()
    change = (both[_RULER[0]] - both["dense"]).groupby(level="index").mean()
    return f"{means.iloc[0]:.1f} → {means.iloc[1]:.1f} ({change.mean():+.1f}{interval(*of_mean(list(change)), '+.1f')})"


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
    small = "SmolLM2-135M"
    places = ((NAME, 1, 32768, 0.2), (NAME, 4, 65536, 0.22), (small, 8, 16384, 0.23), (small, 8, 65536, 0.12))
    columns, head = [], [ERROR]
    for model, yarn, tokens, density in places:
        rows = language_model(tokens, folder, yarn=yarn, model=model)
        curves = Curves(_without_floor(rows))
        columns.append([number(curves.error_at(method, density)) for method in ("hybrid", *OTHERS)])
        head.append(f"{model.removesuffix('-Instruct')}, {thousands(tokens)}, {density:.0%} of the blocks")
    return markdown_table(head, [[f"`{method}`", *cells] for method, *cells in zip(("hybrid", *OTHERS), *columns, strict=True)])


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


def chunks(folder: Path = FOLDER) -> list[str]:
    """Ratios to dense attention in as large chunks."""
    sizes = {"whole": None, "chunks of 32k": 32768, "chunks of 8k": 8192}
    timed = {name: vllm_prefills(folder, "hybrid", model=NAME, run="chunks, YaRN 4", chunk=size) for name, size in sizes.items()}
    ratios = pd.DataFrame({name: rows["ratio"] for name, rows in timed.items()})
    cells = [[thousands(tokens), *(number(ratio) for ratio in row)] for tokens, row in ratios.iterrows()]
    return markdown_table(["prompt", *ratios], cells)


def draw(axes: Any, folder: Path = FOLDER) -> None:
    """Ratios by length, a line per model and engine; a line ends where a length was not timed."""
    engines = {
        "Qwen2.5-Coder-1.5B on text, default options, vLLM, H100": first_tokens(folder),
        "Llama 3.1 8B's shape, random weights: vLLM, H100": vllm_h100(folder),
        "the same shape: SGLang, H200": sglang(folder),
    }
    lengths = sorted({int(tokens) for figures in engines.values() for tokens in figures.index})
    for (name, figures), (colour, marker, dash) in zip(engines.items(), LINES, strict=False):
        style: dict[str, Any] = {"color": colour, "marker": marker, "linestyle": dash, "markersize": 6, "fillstyle": "none"}
        axes.plot(lengths, figures["ratio"].reindex(lengths), label=name, **style)
    axes.axhline(1, color="#444444", linewidth=0.8)
    axes.set(xlabel="tokens of the prompt", ylabel="first token: times as fast as dense", xscale="log", ylim=(0.9, 3.6))
    axes.set_xticks(lengths, [thousands(tokens) for tokens in lengths])
    axes.minorticks_off()
    axes.grid(color="#dddddd", linewidth=0.6)
    axes.legend(frameon=False, fontsize=9, loc="upper left")


TABLES: dict[str, Callable[[Path], list[str]]] = {
    "trained": table,
    "trained-settings": settings,
    "trained-chunks": chunks,
    "trained-methods": methods,
    **{f"trained-tasks-{thousands(length)}": partial(tasks, length) for length in (32768, 65536, 131072)},
}
