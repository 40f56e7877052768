"""SERVING.md from the lines in ``bench/results``: ``python -m bench.serving.table > bench/SERVING.md``.

``serving-*.jsonl`` holds the rows of `bench.serving.first_token`, ``sglang-*.csv`` those of `bench.serving.sglang_first_token`,
``agreement-*.jsonl`` those of ``tests.vllm.agreement``. Of rows with the same key the last one counts.
"""

from __future__ import annotations

import argparse
import csv
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.rows import read_rows, whole_lines
from bench.tables import markdown_table, thousands

Row = dict[str, Any]
_ENGINE = ("device", "vllm", "model", "layers", "gpus", "run")
_GAPS = {"p50": 1, "p95": 0, "p99": 0, "most": 0}  # digits of milliseconds
HEAD = """# Serving

`python -m bench.serving.table > bench/SERVING.md` writes this file. [bench/README.md](README.md#serving) says how to measure,
[docs/serving.md](../docs/serving.md) what the plug-in does.

An earlier version of the plug-in gave the rows of vLLM 0.26 on H200s.
"""


def over_stock(rows: Sequence[Row], value: str, names: Sequence[str]) -> list[str]:
    """Speed-up of each row over the stock backend's with the same `names`; a `value` in seconds is the smaller the better."""

    def key(row: Row) -> tuple[Any, ...]:
        return tuple(map(row.get, names))

    stock = {key(row): row[value] for row in rows if row["method"] == "stock"}
    gains = [row[value] / stock[key(row)] if row["method"] != "stock" and key(row) in stock else None for row in rows]
    return ["-" if gain is None else f"{1 / gain if value == 'seconds' else gain:.2f}x" for gain in gains]


def first_tokens(rows: Sequence[Row]) -> list[str]:
    """Time to first token by length, chunk and attention."""
    rows = sorted(rows, key=lambda row: (row["prompt_tokens"], row["chunk"] or 0, row["method"] != "stock", row["method"]))
    gains = over_stock(rows, "seconds", ("prompt_tokens", "chunk"))
    cells = []
    for row, gain in zip(rows, gains, strict=True):
        chunk = thousands(row["chunk"]) if row["chunk"] else "whole"
        density = "-" if row.get("density") is None else f"{row['density']:.1%}"
        peak = "-" if row.get("peak_gb") is None else f"{row['peak_gb']:.1f} GB"
        # compilations in separate worker processes are not counted
        first = f"{row['first_seconds']:.3f} s, {row['compiled_by_first'] if row['gpus'] == 1 else '-'}"
        cells.append(
            [thousands(row["prompt_tokens"]), chunk, row["method"], density, f"{row['seconds']:.3f} s", gain, first, peak]
        )
    head = ["prompt", "chunks", "attention", "density", "first token", "stock / this", "first request, compiled"]
    return markdown_table([*head, "peak"], cells) if cells else []


def throughput(rows: Sequence[Row]) -> list[str]:
    """Tokens a second with several prompts at a time."""
    rows = sorted(rows, key=lambda row: (row["prompt_tokens"], row["at_once"], row["method"] != "stock", row["method"]))
    gains = over_stock(rows, "tokens_per_second", ("prompt_tokens", "at_once"))
    cells = []
    for row, gain in zip(rows, gains, strict=True):
        asked = f"{row['at_once']} x {thousands(row['prompt_tokens'])}, {row['new_tokens']} more each"
        first, after = row.get("first_token_seconds"), row.get("seconds_a_token_after")
        waited = f"{statistics.median(first):.2f} s, {max(first):.2f} s" if first else "-"
        later = f"{statistics.median(after) * 1e3:.1f} ms" if after and row["new_tokens"] > 1 else "-"
        cells.append([asked, row["method"], f"{row['tokens_per_second']:,.0f}", gain, waited, later])
    head = ["prompts at once", "attention", "tokens/s", "this / stock", "first token: median, last", "each token after: median"]
    return markdown_table(head, cells) if cells else []


def loads(rows: Sequence[Row]) -> list[str]:
    """Prompts that arrive at random beside requests that decode, stock and with the plug-in, a row per size of the chunks."""
    cells = []
    of_stock = {(row["chunk"], row["rate"]): row for row in rows if row["method"] == "stock"}
    for own in (row for row in rows if row["method"] != "stock" and (row["chunk"], row["rate"]) in of_stock):
        stock, chunk = of_stock[own["chunk"], own["rate"]], own["chunk"]
        waits = [f"{statistics.fmean(row['first_token_seconds']):.2f}" for row in (stock, own)]
        gaps = [[f"{row[f'gap_{part}'] * 1e3:,.{digits}f}" for row in (stock, own)] for part, digits in _GAPS.items()]
        cells.append([thousands(chunk), f"{' → '.join(waits)} s", *(f"{' → '.join(pair)} ms" for pair in gaps)])
    head = ["chunks", "first token, mean: dense → flexmask", "between tokens: median", "95%", "99%", "longest"]
    return markdown_table(head, cells) if cells else []


def sglang(rows: Sequence[Row]) -> list[str]:
    """SGLang's first tokens and throughput, stock and with the plug-in."""
    names = ("device", "sglang", "model", "kernel", "prompts", "prompt_tokens", "new_tokens", "chunk", "run")
    stock = {tuple(map(row.get, names)): float(row["seconds"]) for row in rows if row["attention"] == "stock"}
    cells = []
    for row in rows:
        key: tuple[Any, ...] = tuple(map(row.get, names))
        device, release, model, kernel, prompts, tokens, new, chunk, _ = key
        size = f"{prompts} x {thousands(int(tokens))} in chunks of {thousands(int(chunk))}, {new} new"
        gain = "-" if row["attention"] == "stock" else f"{stock[key] / float(row['seconds']):.2f}x"
        density = f"{float(row['density']):.1%}" if row["density"] else "-"
        seconds = f"{float(row['seconds']):.3f} s"
        cells.append(
            [f"{device}, SGLang {release}", model, kernel, size, row["attention"], density, seconds, gain, row["rounds"]]
        )
    head = ["run on", "shape", "stock kernel", "prompts", "attention", "density", "all done", "stock / this", "rounds"]
    return ["## SGLang", "", *markdown_table(head, cells)] if cells else []


def agreement(rows: Sequence[Row], engine: str) -> list[str]:
    """Differences between the engines' answers."""
    cells = []
    for row in rows:
        numbers = [f"{row[name]:.1e}" for name in ("mean", "p99", "most")]
        cells.append([row["compared"], row["asked"].replace("_", " "), f"{row['tokens_alike']} of {row['tokens']}", *numbers])
    head = ["compared", "asked", "tokens alike", "log-probabilities: mean", "99%", "most"]
    return [f"## Answers in bfloat16{engine}", "", *markdown_table(head, cells)[1:]] if cells else []


def engine_rows(folder: Path) -> list[Row]:
    """Rows of `bench.serving.first_token`, the last of each key."""
    measured = [row for path in sorted(folder.glob("serving-*.jsonl")) for row in read_rows(path)]
    names = (*_ENGINE, "method", "prompt_tokens", "prompt", "chunk", "at_once", "rate")
    return list({tuple(map(row.get, names)): row for row in measured}.values())


def report(folder: Path) -> str:
    """The file's text: tables of each engine and run."""
    engines: dict[tuple[Any, ...], list[Row]] = {}
    for row in engine_rows(folder):
        engines.setdefault(tuple(map(row.get, _ENGINE)), []).append(row)
    lines: list[str] = []
    for (device, release, model, layers, gpus, run), own in engines.items():
        of_layers = f", {layers} layers" if layers else ""
        lines += [f"## {model}{of_layers}, {gpus} x {device}, vLLM {release}{f': {run}' if run else ''}", ""]
        lines += first_tokens([row for row in own if "first_seconds" in row])
        lines += throughput([row for row in own if "tokens_per_second" in row])
        lines += loads([row for row in own if "rate" in row])
    lines += sglang([row for path in sorted(folder.glob("sglang-*.csv")) for row in csv.DictReader(whole_lines(path))])
    for path in sorted(folder.glob("agreement-*.jsonl")):
        of = {"sglang": ", SGLang", "adapter": ", the adapter for transformers on a CPU"}.get(path.name.split("-")[1], "")
        lines += agreement(read_rows(path), of)
    return HEAD + "\n" + "\n".join(lines).replace("\n\n\n", "\n\n").strip()


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=Path(__file__).parents[1] / "results")
    print(report(parser.parse_args(arguments).results))


if __name__ == "__main__":
    main()
