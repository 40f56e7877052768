"""What FlexAttention's FLASH kernel serves, and how fast: ``python -m bench.speed.flash_features``, on a Hopper GPU.

``checks`` runs the numeric check of every kind of call in a process of its own. ``times`` compares whole calls of hybrid by FLASH
and by Triton with the fastest dense kernel, for shapes of models at one density: shapes compile at the same time, each in its
process, and are timed one after the other.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import multiprocessing
import os
import subprocess
import sys
import threading
import traceback
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import torch

from bench import ON_GPU
from bench.prompts.structured import Tensors, structured_prompt
from bench.rows import Sheet
from bench.speed import calls, clock
from bench.tables import text_table
from flexmask import sparse_attention
from flexmask.flex.flash_call import FlashCall
from flexmask.flex.flash_check import Verdict, check_flash

COLUMNS = ("device", "torch", "flash_attn_4", "part", "name", "tokens", "density", "what", "value")
_DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}
# changes to a plain call of head_dim 128 in bfloat16
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "windows, chunks": {"captures": True},
    "padding": {"padded": True},
    "padding, windows, chunks": {"captures": True, "padded": True},
    "soft cap": {"softcap": True},
    "soft cap, windows, chunks": {"captures": True, "softcap": True},
    "one mask for all heads": {"shared": True},
    "one mask, padding": {"shared": True, "padded": True},
    "float16": {"dtype": "float16"},
    "float16, padding, soft cap": {"dtype": "float16", "padded": True, "softcap": True},
    **{f"head_dim {size}": {"head_dim": size, "v_head_dim": size} for size in (16, 64, 72, 80, 96, 100, 160, 192, 256)},
    **{f"head_dim {wide}, values {values}": {"head_dim": wide, "v_head_dim": values} for wide, values in
       ((192, 128), (128, 64), (64, 128), (128, 192), (128, 256))},
    "192, values 128, windows, chunks": {"head_dim": 192, "captures": True},
    "192, values 128, soft cap": {"head_dim": 192, "softcap": True},
    "blocks of 64": {"block_size": 64},
    "blocks of 192": {"block_size": 192},
    "blocks of 256": {"block_size": 256},
    "gradients": {"gradients": True},
    "gradients, head_dim 64": {"gradients": True, "head_dim": 64, "v_head_dim": 64},
    "gradients, 192, values 128": {"gradients": True, "head_dim": 192},
    "gradients, soft cap": {"gradients": True, "softcap": True},
    "gradients, padding, windows, chunks": {"gradients": True, "padded": True, "captures": True},
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
_LEAST_STRUCTURED = 98  # head_dim of the structured workload
_ROUNDS = 5 if ON_GPU else 1
# for all shapes to compile
_MOST_WAIT = 150


def call_of(changes: dict[str, Any]) -> FlashCall:
    plain = FlashCall(torch.bfloat16, 128, 128)
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


def checks(at_once: int) -> list[dict[str, Any]]:
    """A row per kind of call."""
    with ThreadPoolExecutor(at_once) as pool:
        verdicts = list(pool.map(checked, KINDS.values()))
    rows = []
    for name, found in zip(KINDS, verdicts, strict=True):
        lse = found["lse_reason"] or f"times {found['lse_factor']:.4g}, off by {found['lse_error']:.1e}"
        outcome = {"output": found["reason"] or f"off by {found['error']:.1e}", "log-sum-exp": "" if found["reason"] else lse}
        rows.append({"part": "checks", "name": name, **outcome, "seconds": f"{found['seconds']:.1f}"})
    return rows


def prompt(shape: Shape, tokens: int) -> Tensors:
    """Structured queries and keys where the heads are wide enough, else noise: the mask decides the time, not the numbers."""
    device, dtype = ("cuda", torch.bfloat16) if ON_GPU else ("cpu", torch.float32)
    heads: dict[str, Any] = {"num_heads": shape.num_heads, "num_kv_heads": shape.num_kv_heads, "head_dim": shape.head_dim}
    if shape.head_dim >= _LEAST_STRUCTURED:
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


def times_of(name: str, tokens: int, density: float, barrier: Any, lock: Any, results: Any) -> None:
    """Compile a shape's calls, wait for the other shapes, time the calls, and put the rows into `results`."""
    row = {"part": "times", "name": name, "tokens": tokens}
    try:
        with torch.no_grad():
            found, kept = calls_of(SHAPES[name], tokens, density)
            errors = {what: problem for what, call in found.items() if (problem := _tried(call)) is not None}
            _wait(barrier)
            with lock:
                timed = clock.in_turns({what: call for what, call in found.items() if what not in errors}, _ROUNDS)
        results.put([{**row, "density": kept, "what": what, "value": value} for what, value in {**timed, **errors}.items()])
    except BaseException:
        results.put([{**row, "what": "error", "value": traceback.format_exc().strip().splitlines()[-1]}])
        barrier.abort()
        raise


def _tried(call: clock.Call) -> str | None:
    try:
        call()
        call()
    except Exception as error:
        return clock.text_of(error)
    return None


def _wait(barrier: Any) -> None:
    # if a shape failed or takes too long, times may be disturbed, and are better than none
    with contextlib.suppress(threading.BrokenBarrierError):
        barrier.wait(_MOST_WAIT)


def times(names: Sequence[str], tokens: int, density: float) -> list[dict[str, Any]]:
    """A row per shape and call, milliseconds or an error."""
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # of each of the processes
    context = multiprocessing.get_context("spawn")
    barrier, lock, results = context.Barrier(len(names)), context.Lock(), context.Queue()
    workers = [context.Process(target=times_of, args=(name, tokens, density, barrier, lock, results)) for name in names]
    for worker in workers:
        worker.start()
    rows = [row for _ in workers for row in results.get(timeout=2 * _MOST_WAIT)]
    for worker in workers:
        worker.join()
    return sorted(rows, key=lambda row: (list(names).index(row["name"]), not row["what"].startswith("dense")))


def times_table(rows: Sequence[dict[str, Any]]) -> str:
    """A line per shape and call, with the ratio to the shape's fastest dense kernel."""
    lines = []
    for row in rows:
        own = [each["value"] for each in rows if each["name"] == row["name"] and each["what"].startswith("dense")]
        fastest = min((value for value in own if isinstance(value, float)), default=None)
        value = row["value"]
        is_time = isinstance(value, float)
        ratio = f"{fastest / value:.2f}x" if is_time and fastest is not None else ""
        cells = [row["name"], f"{row['tokens']:,}", f"{row.get('density', 0):.1%}", row["what"]]
        lines.append([*cells, f"{value:.2f} ms" if is_time else str(value), ratio])
    return text_table([["shape", "tokens", "density", "call", "time", "over dense"], *lines], "<>><<>")


def main(arguments: Sequence[str] | None = None) -> None:
    """Print both tables, and append their rows to a file if one is given."""
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
    identity = {"device": clock.device_name(), "torch": torch.__version__, "flash_attn_4": _version("flash-attn-4")}
    print(", ".join(identity.values()), flush=True)
    made: list[dict[str, Any]] = []
    if "checks" in options.parts:
        rows = checks(options.at_once)
        head = ["name", "output", "log-sum-exp", "seconds"]
        print(text_table([head, *([str(row[name]) for name in head] for row in rows)], "<<<>"), flush=True)
        made += [{**row, "what": what, "value": row[what]} for row in rows for what in ("output", "log-sum-exp", "seconds")]
    if "times" in options.parts:
        rows = times(options.shapes, options.tokens, options.density)
        print(times_table(rows), flush=True)
        made += rows
    if options.out is not None:
        sheet = Sheet(options.out, COLUMNS, COLUMNS)
        for row in made:
            sheet.add(**identity, **{name: value for name, value in row.items() if name in COLUMNS})


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "missing"


if __name__ == "__main__":
    main()
