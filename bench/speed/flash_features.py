"""Times FlexAttention's FLASH kernel and lists what it serves: ``python -m bench.speed.flash_features``, on a Hopper GPU.

``checks`` runs the numeric check of every kind of call in a process of its own. ``times`` compares whole calls of hybrid by FLASH
and by Triton with the fastest dense kernel, for shapes of models at one density.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch

from bench import ON_GPU
from bench.prompts.structured import Tensors, structured_prompt
from bench.rows import Sheet
from bench.speed import calls, clock
from bench.tables import text_table
from flexmask import sparse_attention
from flexmask.flex.flash_case import FlashKind
from flexmask.flex.flash_check import Verdict, check_flash

COLUMNS = ("device", "torch", "flash_attn_4", "part", "name", "tokens", "density", "what", "value")
_DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}
# changes to a plain call of head_dim 128 in bfloat16
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "windows, chunks": {"has_window_or_offset": True},
    "padding": {"has_padding": True},
    "padding, windows, chunks": {"has_window_or_offset": True, "has_padding": True},
    "soft cap": {"has_softcap": True},
    "soft cap, windows, chunks": {"has_window_or_offset": True, "has_softcap": True},
    "one mask for all heads": {"shares_lists": True},
    "one mask, padding": {"shares_lists": True, "has_padding": True},
    "float16": {"dtype": "float16"},
    "float16, padding, soft cap": {"dtype": "float16", "has_padding": True, "has_softcap": True},
    **{f"head_dim {size}": {"head_dim": size, "v_head_dim": size} for size in (16, 64, 72, 80, 96, 100, 160, 192, 256)},
    **{f"head_dim {wide}, values {values}": {"head_dim": wide, "v_head_dim": values} for wide, values in
       ((192, 128), (128, 64), (64, 128), (128, 192), (128, 256))},
    "192, values 128, windows, chunks": {"head_dim": 192, "has_window_or_offset": True},
    "192, values 128, soft cap": {"head_dim": 192, "has_softcap": True},
    "256, windows, chunks": {"head_dim": 256, "v_head_dim": 256, "has_window_or_offset": True},
    "256, padding, soft cap": {"head_dim": 256, "v_head_dim": 256, "has_padding": True, "has_softcap": True},
    "blocks of 64": {"block_size": 64},
    "blocks of 192": {"block_size": 192},
    "blocks of 256": {"block_size": 256},
    "gradients": {"needs_grad": True},
    "gradients, head_dim 64": {"needs_grad": True, "head_dim": 64, "v_head_dim": 64},
    "gradients, 192, values 128": {"needs_grad": True, "head_dim": 192},
    "gradients, soft cap": {"needs_grad": True, "has_softcap": True},
    "gradients, padding, windows, chunks": {"needs_grad": True, "has_padding": True, "has_window_or_offset": True},
}  # fmt: skip


class Shape(NamedTuple):
    num_heads: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    softcap: float | None = None
    has_sinks: bool = False


SHAPES = {
    "llama-3.1-8b": Shape(32, 8, 128, 128),
    "deepseek-v3": Shape(128, 128, 192, 128),
    "gpt-oss": Shape(64, 8, 64, 64, has_sinks=True),
    "gemma-2-27b": Shape(32, 16, 128, 128, softcap=50.0),
    "qwen3.5": Shape(16, 4, 256, 256),
    "gemma-4": Shape(16, 2, 512, 512),  # of layers with attention to the whole prompt
}
if not ON_GPU:
    SHAPES = {"small": Shape(4, 2, 128, 128)}
_MIN_STRUCTURED = 98  # head_dim of the structured workload
_ROUNDS = 5 if ON_GPU else 1


def call_of(changes: dict[str, Any]) -> FlashKind:
    plain = FlashKind(torch.bfloat16, 128, 128)
    return plain._replace(**{**changes, "dtype": _DTYPES[changes.get("dtype", "bfloat16")]})


def one_check(changes: dict[str, Any]) -> dict[str, Any]:
    """The verdict on a kind of call, in this process."""
    device = torch.device("cuda", torch.cuda.current_device()) if ON_GPU else torch.device("cpu")
    return check_flash(call_of(changes), device)._asdict()


def checked(changes: dict[str, Any], seconds: float = 150) -> dict[str, Any]:
    """The verdict on a kind of call, in another process, which a fault of the kernel may end."""
    command = [sys.executable, "-m", "bench.speed.flash_features", "--kind", json.dumps(changes)]
    threads = {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, env={**os.environ, **threads})
    except subprocess.TimeoutExpired:
        return Verdict(reason=f"no answer in {seconds:.0f} s", seconds=seconds)._asdict()
    lines = done.stdout.strip().splitlines()
    if done.returncode == 0 and lines:
        found: dict[str, Any] = json.loads(lines[-1])
        return found
    words = (done.stderr.strip().splitlines() or [""])[-1]
    return Verdict(reason=f"its process ended with {done.returncode}: {words}")._asdict()


def checks(at_once: int) -> dict[str, dict[str, str]]:
    """Findings about the output and the log-sum-exp, and the seconds that they took, by kind of call."""
    with ThreadPoolExecutor(at_once) as pool:
        verdicts = list(pool.map(checked, KINDS.values()))
    rows = {}
    for name, found in zip(KINDS, verdicts, strict=True):
        rows[name] = {"output": found["reason"], "log-sum-exp": "", "seconds": f"{found['seconds']:.1f}"}
        if not found["reason"]:
            lse = found["lse_reason"] or f"times {found['lse_factor']:.4g}, off by {found['lse_error']:.1e}"
            rows[name].update({"output": f"off by {found['error']:.1e}", "log-sum-exp": lse})
    return rows


def prompt(shape: Shape, tokens: int) -> Tensors:
    """Structured queries and keys where the heads are wide enough, else noise: the mask decides the time, not the numbers."""
    device, dtype = ("cuda", torch.bfloat16) if ON_GPU else ("cpu", torch.float32)
    heads: dict[str, Any] = {"num_heads": shape.num_heads, "num_kv_heads": shape.num_kv_heads, "head_dim": shape.head_dim}
    if shape.head_dim >= _MIN_STRUCTURED:
        query, key, value = structured_prompt(tokens, 0.2, device=device, dtype=dtype, **heads)
        return query, key, value[..., : shape.v_head_dim].contiguous()
    random = torch.Generator(device).manual_seed(0)
    sizes = ((shape.num_heads, shape.head_dim), (shape.num_kv_heads, shape.head_dim), (shape.num_kv_heads, shape.v_head_dim))
    made = (torch.randn(1, number, tokens, size, device=device, dtype=dtype, generator=random) for number, size in sizes)
    query, key, value = made
    return 2 * query, key, value


def calls_of(shape: Shape, tokens: int, density: float) -> tuple[dict[str, clock.Call], float]:
    """Dense kernels and whole calls of hybrid, and hybrid's density. SDPA has neither soft cap nor sinks: its calls lack them."""
    attend: Any = sparse_attention
    tensors = prompt(shape, tokens)
    options, kept = calls.at_density(tensors, "hybrid", density)
    sinks = torch.zeros(shape.num_heads, device=tensors[0].device) if shape.has_sinks else None
    found = calls.dense_calls(tensors)
    for backend in calls.BACKENDS:
        name = "auto" if backend == "cpu" else backend
        scores: dict[str, Any] = {"softcap": shape.softcap, "sinks": sinks, "backend": name, "dense_below": 0}
        run = functools.partial(attend, *tensors, "hybrid", **scores, **options)
        found[f"hybrid {backend}"] = run
        if backend == "flash":
            found["hybrid flash, log-sum-exp"] = functools.partial(run, return_lse=True)
    return found, kept


def times(name: str, tokens: int, density: float) -> list[dict[str, Any]]:
    """A row per call of a shape, milliseconds or an error."""
    with torch.no_grad():
        found, kept = calls_of(SHAPES[name], tokens, density)
        timed = clock.in_turns(found, _ROUNDS)
    clock.free()
    row = {"part": "times", "name": name, "tokens": tokens, "density": kept}
    return [{**row, "what": what, "value": timed[what]} for what in found]


def times_table(rows: Sequence[dict[str, Any]]) -> str:
    """A line per call of a shape, with the ratio to the shape's fastest dense kernel."""
    fastest = min(row["value"] for row in rows if row["what"].startswith("dense") and isinstance(row["value"], float))
    lines = []
    for row in rows:
        value, cells = row["value"], [row["name"], f"{row['tokens']:,}", f"{row['density']:.1%}", row["what"]]
        is_time = isinstance(value, float)
        lines.append([*cells, f"{value:.2f} ms" if is_time else value, f"{fastest / value:.2f}x" if is_time else ""])
    return text_table([["shape", "tokens", "density", "call", "time", "over dense"], *lines], "<>><<>")


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the tables, and append their rows to a file if one is given."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", default=["checks", "times"], help="checks, times; default: both")
    parser.add_argument("--tokens", type=int, default=32768 if ON_GPU else 1024)
    parser.add_argument("--density", type=float, default=0.17, help="of hybrid's masks")
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--at-once", type=int, default=12, help="checks that run at the same time")
    parser.add_argument("--out", type=Path, help="CSV file to append rows to")
    parser.add_argument("--kind", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.kind is not None:
        print(json.dumps(one_check(options.kind)))
        return
    identity = {"device": clock.device_name(), "torch": torch.__version__, "flash_attn_4": clock.version("flash-attn-4")}
    print(", ".join(identity.values()), flush=True)
    sheet = Sheet(options.out, COLUMNS, COLUMNS) if options.out is not None else None

    def keep(rows: Sequence[dict[str, Any]]) -> None:
        if sheet is not None:
            for row in rows:
                sheet.add(**identity, **row)

    if "checks" in options.parts:
        found = checks(options.at_once)
        head = ["name", "output", "log-sum-exp", "seconds"]
        print(text_table([head, *([name, *verdict.values()] for name, verdict in found.items())], "<<<>"), flush=True)
        named = [{"name": name, "what": what, "value": text} for name, texts in found.items() for what, text in texts.items()]
        keep([{"part": "checks", **row} for row in named])
    for name in options.shapes if "times" in options.parts else ():
        rows = times(name, options.tokens, options.density)
        print(times_table(rows), flush=True)
        keep(rows)


if __name__ == "__main__":
    main()
