"""SERVING.md from the lines in ``bench/results``: ``python -m bench.serving.table > bench/SERVING.md``.

``serving-*.jsonl`` holds the rows of `bench.serving.first_token`, ``agreement-*.jsonl`` those of ``tests.vllm.agreement``. Of
rows with the same key the last one counts.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from bench.measure.results import FOLDER
from bench.reporting.tables import markdown_table, share, thousands, times

Row = dict[str, Any]
_ENGINE = ("device", "vllm", "model", "layers", "gpus", "run")
_KEY = (*_ENGINE, "method", "prompt_tokens", "chunk", "at_once")
# By a word in the kernel's name, the first that is found. Eager kernels are the plug-in's, since vLLM compiles its own; copies
# that convert ("unrolled") turn maps of blocks into integers
_KERNELS = (
    ("copies", ("memcpy", "reshape_and_cache")),
    ("masks", ("unrolled_elementwise",)),
    ("attention", ("flash", "triton_tem")),
    ("linear layers", ("gemm", "nvjet", "cublas")),
    ("copies", ("direct_copy",)),
    ("masks", ("at::", "distribution", "memset", "_block_sums", "_pooled", "_digit_pass", "_means_", "_lists_", "_lines_")),
    ("masks", ("_pattern_", "_chosen_", "_ties_", "_estimate_", "_row_norms", "_evidence", "_last_rows")),
)
_KINDS = ("attention", "linear layers", "copies", "masks", "rest")
HEAD = """# Serving

`python -m bench.serving.table > bench/SERVING.md` writes this file. [bench/README.md](README.md#serving) says how to measure,
[docs/serving.md](../docs/serving.md) what the plug-in does.
"""


def latest(rows: Iterable[Row]) -> list[Row]:
    """The last row of each key, in the order of the first ones."""
    return list({(*(row.get(name) for name in _KEY), "kernels_ms" in row): row for row in rows}.values())


def first_token_tables(rows: Sequence[Row]) -> list[str]:
    """One table an engine and run: time to first token over the stock backend's at the same length and chunk, and throughput."""
    lines: list[str] = []
    for engine in dict.fromkeys(tuple(row.get(name) for name in _ENGINE) for row in rows):
        device, release, model, layers, gpus, run = engine
        own = [row for row in rows if tuple(row.get(name) for name in _ENGINE) == engine]
        of_layers = f", {layers} layers" if layers else ""
        lines += [f"## {model}{of_layers}, {gpus} x {device}, vLLM {release}{f': {run}' if run else ''}", ""]
        lines += _first_tokens([row for row in own if "first_seconds" in row])
        lines += _throughput([row for row in own if "tokens_per_second" in row])
        lines += _kernels([row for row in own if "kernels_ms" in row])
    return lines


def _first_tokens(rows: Sequence[Row]) -> list[str]:
    def order(row: Row) -> tuple[Any, ...]:
        return row["prompt_tokens"], row["chunk"] or 0, row["method"] != "stock", row["method"]

    stock = {(row["prompt_tokens"], row["chunk"]): row["seconds"] for row in rows if row["method"] == "stock"}
    cells = []
    for row in sorted(rows, key=order):
        dense = stock.get((row["prompt_tokens"], row["chunk"]))
        gain = times(dense / row["seconds"]) if dense and row["method"] != "stock" else "-"
        chunk = thousands(row["chunk"]) if row["chunk"] else "whole"
        peak = "-" if row.get("peak_gb") is None else f"{row['peak_gb']:.1f} GB"
        if row.get("profiled_gb") and row.get("cache_gb"):
            peak = f"{row['peak_gb'] - row['cache_gb']:.1f} of {row['profiled_gb']:.1f} GB"
        # what workers of their own compile is not seen
        compiled = row["compiled_by_first"] if row["gpus"] == 1 else "-"
        first = f"{row['first_seconds']:.3f} s, {compiled}"
        length = thousands(row["prompt_tokens"])
        cells.append([length, chunk, row["method"], share(row.get("density")), f"{row['seconds']:.3f} s", gain, first, peak])
    head = [
        "prompt",
        "chunks",
        "attention",
        "density",
        "first token",
        "stock / this",
        "first request, compiled",
        "peak (without cache, of what vLLM measured)",
    ]
    return markdown_table(head, cells) if cells else []


def _throughput(rows: Sequence[Row]) -> list[str]:
    stock = {(row["prompt_tokens"], row["at_once"]): row["tokens_per_second"] for row in rows if row["method"] == "stock"}
    cells = []
    for row in sorted(rows, key=lambda row: (row["prompt_tokens"], row["at_once"], row["method"] != "stock", row["method"])):
        dense = stock.get((row["prompt_tokens"], row["at_once"]))
        gain = times(row["tokens_per_second"] / dense) if dense and row["method"] != "stock" else "-"
        asked = f"{row['at_once']} x {thousands(row['prompt_tokens'])}, {row['new_tokens']} more each"
        first, after = row.get("first_token_seconds"), row.get("seconds_a_token_after")
        waited = f"{statistics.median(first):.2f} s, {max(first):.2f} s" if first else "-"
        later = f"{statistics.median(after) * 1e3:.1f} ms" if after and row["new_tokens"] > 1 else "-"
        cells.append([asked, row["method"], f"{row['tokens_per_second']:,.0f}", gain, waited, later])
    head = ["prompts at once", "attention", "tokens/s", "this / stock", "first token: median, last", "each token after: median"]
    return markdown_table(head, cells) if cells else []


def by_kind(row: Row) -> dict[str, float]:
    """Milliseconds of a prefill's kernels by kind, those that are not named in the row under "rest"."""
    found = dict.fromkeys(_KINDS, 0.0)
    for name, milliseconds in row["kernels_ms"].items():
        kind = next((kind for kind, words in _KERNELS if any(word in name.lower() for word in words)), "rest")
        found[kind] += milliseconds
    found["rest"] += row["all_kernels_ms"] - sum(found.values())
    return found


def _kernels(rows: Sequence[Row]) -> list[str]:
    cells = []
    for row in rows:
        kinds = by_kind(row)
        numbers = [f"{kinds[kind]:,.0f} ms" for kind in kinds]
        cells.append([thousands(row["prompt_tokens"]), row["method"], *numbers, f"{row['all_kernels_ms']:,.0f} ms"])
    return markdown_table(["prompt", "run with", *_KINDS, "all kernels"], cells) if cells else []


def agreement_table(rows: Sequence[Row]) -> list[str]:
    """Differences between the engines' answers."""
    cells = []
    for row in rows:
        numbers = [f"{row[name]:.1e}" for name in ("mean", "p99", "most")]
        cells.append([row["compared"], row["asked"].replace("_", " "), f"{row['tokens_alike']} of {row['tokens']}", *numbers])
    head = ["compared", "asked", "tokens alike", "log-probabilities: mean", "99%", "most"]
    return ["## Answers in bfloat16", "", *markdown_table(head, cells)[1:]] if cells else []


def read(paths: Iterable[Path]) -> list[Row]:
    """All lines of some files."""
    return [json.loads(line) for path in paths for line in path.read_text(encoding="utf-8").splitlines()]


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=FOLDER)
    folder = parser.parse_args(arguments).results
    lines = first_token_tables(latest(read(sorted(folder.glob("serving-*.jsonl")))))
    lines += agreement_table(read(sorted(folder.glob("agreement-*.jsonl"))))
    print(HEAD + "\n" + "\n".join(lines).replace("\n\n\n", "\n\n").strip())


if __name__ == "__main__":
    main()
