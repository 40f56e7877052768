"""Qwen2.5-Coder-1.5B-Instruct: first tokens in vLLM, also beside those of random weights, error on texts, and RULER's tasks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd

from bench.intervals import of_mean
from bench.report import LINES
from bench.report.fidelity import hybrid_at, language_model, mean_of
from bench.report.first_token import RANDOM, sglang, transformers, vllm_h100, vllm_prefills
from bench.report.rows import ERROR, FOLDER, Curves, interval, number, percent
from bench.report.speed import times
from bench.rows import read_rows
from bench.tables import markdown_table, thousands

NAME = "Qwen2.5-Coder-1.5B-Instruct"
GAMMAS = {0.9: "hybrid", 0.95: "hybrid, gamma 0.95"}  # by gamma, the method's name in the rows of vLLM
_FLOOR = '{{"gamma": {gamma}, "min_coverage": {floor}}}'
_NATIVE = (16384, 32768)  # tokens that need no YaRN
_RULER = ("hybrid, gamma 0.9", "hybrid, gamma 0.95", "flexprefill, gamma 0.9")
_PAGE = "bench/FIDELITY.md#a-trained-model-of-15-billion-parameters"


def first_tokens(folder: Path = FOLDER, gamma: float = 0.9) -> pd.DataFrame:
    """Mean seconds over four texts, dense and with the default floor, by prompt tokens."""
    runs = ("texts", "texts, YaRN 4")
    return pd.concat([vllm_prefills(folder, GAMMAS[gamma], model=NAME, run=run) for run in runs])


def errors(length: int, options: str, folder: Path = FOLDER) -> pd.DataFrame:
    """Hybrid's rows on the texts at a length, under some options."""
    return hybrid_at(language_model(length, folder, yarn=1, model=NAME), options)


def table(folder: Path = FOLDER) -> list[str]:
    """First token, density and error by length."""
    cells = []
    for tokens, row in first_tokens(folder).iterrows():
        figures = ["not measured"] * 2
        if tokens in _NATIVE:
            own = errors(int(tokens), _FLOOR.format(gamma=0.9, floor=0.5), folder)
            figures = [mean_of(own, "abs_d", ".2f"), mean_of(own, "d_loss", "+.3f")]
        seconds = [f"{row['dense']:.3f} s", f"{row['sparse']:.3f} s", f"[{times(row['ratio'], 2)}]({_PAGE})"]
        length = thousands(tokens) + ("" if tokens in _NATIVE else ", YaRN 4")
        cells.append([length, *seconds, percent(row["density"]), *figures])
    return markdown_table(["prompt", "dense", "flexmask", "faster", "density", f"error, {ERROR}", "change of the loss"], cells)


def settings(folder: Path = FOLDER) -> list[str]:
    """Hybrid by gamma and floor beside the others at as many blocks."""
    cells = []
    for length in _NATIVE:
        rows = language_model(length, folder, yarn=1, model=NAME)
        measured = Curves(rows[~rows["options"].str.contains('"min_coverage": 0.5')])
        for gamma, floor in ((0.85, 0.0), (0.9, 0.0), (0.9, 0.5), (0.95, 0.0)):
            own = errors(length, _FLOOR.format(gamma=gamma, floor=floor), folder)
            density = own["density"].mean()
            others = [number(measured.error_at(other, density)) for other in ("flexprefill", "xattention")]
            figures = [mean_of(own, "abs_d", ".3f"), mean_of(own, "d_loss", "+.3f")]
            cells.append([thousands(length), f"{gamma:g}", f"{floor:g}", percent(density), *figures, *others])
    head = ["tokens", "gamma", "`min_coverage`", "density", ERROR, "change of the loss"]
    return markdown_table([*head, *(f"{name}'s {ERROR} at this density" for name in ("flexprefill", "xattention"))], cells)


def scores(folder: Path = FOLDER) -> pd.DataFrame:
    """Scores of prompts, 0 to 100, by task and index, a column per method."""
    rows = pd.DataFrame(read_rows(folder / "ruler-vllm-h100.jsonl")[1:])
    return 100 * rows.pivot_table(index=["task", "index"], columns="method", values="score")


def tasks(folder: Path = FOLDER) -> list[str]:
    """RULER's tasks at 32k tokens: dense scores, and what each method changes on the same prompts."""
    cells = []
    for task, own in scores(folder).groupby(level="task"):
        changes = []
        for method in _RULER:
            change = (own[method] - own["dense"]).dropna() if method in own else pd.Series(dtype=float)
            of = f" ({len(change)})" if 0 < len(change) < len(own) else ""
            changes.append(f"{change.mean():+.1f}{interval(*of_mean(list(change)), '+.1f')}{of}" if len(change) else "-")
        cells.append([f"`{task}`", f"{own['dense'].mean():.1f}", *changes])
    return markdown_table(["task", "dense", *_RULER], cells)


def draw(axes: Any, folder: Path = FOLDER) -> None:
    """Ratios by length, a line per model and engine; a line ends where a length was not timed."""
    engines = {
        "Qwen2.5-Coder-1.5B on text, default options, vLLM, H100": first_tokens(folder),
        "Llama 3.1 8B's shape, random weights: vLLM, H100": vllm_h100(folder),
        "the same: SGLang, H200": sglang(folder),
        f"the same: transformers, H200, random blocks, density {RANDOM:.0%}": transformers(folder),
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


TABLES = {"trained": table, "trained-settings": settings, "trained-tasks": tasks}
