"""Time to first token and throughput of a vLLM engine: ``python -m bench.serving.first_token --model FOLDER --json FILE``.

One engine a process, with the stock backend (``--stock``) or with the plug-in, as vLLM runs it: compiled, with CUDA graphs.
``--settings`` are those under "flexmask"; with ``--shape``, of random weights, name the method of `bench.speed.random_blocks`.
Rows are appended to ``--json``; `bench.serving.table` compares them.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import itertools
import json
import statistics
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from bench.rows import append_row
from bench.serving.load import throughput, under_load
from bench.serving.prompts import add_model, prompts
from bench.serving.vllm_engine import counted, generate, make_engine
from bench.speed.clock import device_name
from flexmask.json_settings import json_data


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_model(parser)
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--stock", action="store_true", help="vLLM's FLASH_ATTN, without the plug-in")
    how.add_argument("--settings", type=json_data, default={}, help='JSON like \'{"method": "random_blocks", "density": 0.2}\'')
    parser.add_argument("--prompt-tokens", type=int, nargs="+", default=[32768, 65536, 131072])
    parser.add_argument("--prompts", type=int, default=1, help="different prompts of a length, each with a row (1)")
    parser.add_argument(
        "--chunks", type=int, nargs="*", default=[], help="also prefill longer prompts in chunks of so many tokens"
    )
    parser.add_argument("--prefills", type=int, default=3, help="prefills that the median is taken over, after the first")
    parser.add_argument("--at-once", type=int, default=0, help="also measure throughput with so many prompts at a time")
    parser.add_argument("--new-tokens", type=int, default=32, help="tokens a prompt in the measurement of throughput")
    parser.add_argument(
        "--rate", type=float, help="prompts a second that arrive at random while --at-once requests decode; alone, in --chunks"
    )
    parser.add_argument("--turns", type=Path, help="file that engines lock in turns, a prompt's prefills at a time")
    parser.add_argument("--engines", type=int, default=1, help="with --turns: start when so many are ready")
    parser.add_argument("--utilization", type=float, default=0.9, help="share of the GPU's memory, as vLLM's")
    parser.add_argument("--tensor-parallel", type=int, default=1)
    parser.add_argument(
        "--engine", type=json.loads, default={}, help="JSON: more arguments of vllm.LLM, which replace those above"
    )
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--run", help="a name: only rows of the same one are compared")
    parser.add_argument("--json", type=Path, required=True)
    return parser.parse_args(arguments)


def described(options: argparse.Namespace) -> str:
    """The attention's name in a table."""
    if options.stock:
        return "stock"
    told = {name: value for name, value in options.settings.items() if name not in ("method", "max_mask_bytes", "dense_below")}
    return ", ".join([options.settings.get("method", "hybrid"), *(f"{name} {value}" for name, value in told.items())])


def graphs() -> int:
    """Graphs that torch compiled so far in this process."""
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"])


def measure(llm: Any, options: argparse.Namespace, prompt: list[int], chunk: int | None) -> dict[str, Any]:
    """One prompt: its first request by itself, then the median of those after it."""
    asked, counters, before = [prompt], counted(llm, options), graphs()
    if chunk:
        # rows of a step at most, which vLLM reads in every step
        llm.llm_engine.engine_core.engine_core.scheduler.max_num_scheduled_tokens = chunk
    on_gpu = options.device == "cuda" and options.tensor_parallel == 1
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    first, _ = generate(llm, asked, 1)
    compiled = graphs() - before
    times = [generate(llm, asked, 1)[0] for _ in range(options.prefills)]
    row = {"prompt_tokens": len(prompt), "chunk": chunk, "seconds": statistics.median(times), "first_seconds": first}
    row["compiled_by_first"] = compiled if options.tensor_parallel == 1 else None
    if counters is not None:
        row |= {"sparse_tokens": counters.sparse_tokens, "dense_tokens": counters.dense_tokens, "density": counters.density}
    return {**row, "peak_gb": torch.cuda.max_memory_allocated() / 1e9} if on_gpu else row


def wait_for_engines(turns: Path, number: int) -> None:
    """Return when so many engines have come here."""
    with turns.open("a") as file:
        file.write("ready\n")
    while len(turns.read_text().splitlines()) < number:
        time.sleep(0.1)


@contextlib.contextmanager
def turn(turns: Path | None) -> Iterator[None]:
    """Run while no other process does; None: at once."""
    if turns is None:
        yield
        return
    with turns.open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
    time.sleep(0.2)  # the others' turn


def rows(llm: Any, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """All rows, as the command line selects them."""
    if options.rate:
        for chunk, tokens in itertools.product(options.chunks, options.prompt_tokens):
            yield under_load(llm, options, tokens, chunk)
        return
    for chunk, tokens in itertools.product([None, *options.chunks], options.prompt_tokens):
        if chunk is None or tokens > chunk:
            for number, prompt in enumerate(prompts(options, tokens, options.prompts)):
                with turn(options.turns):
                    row = measure(llm, options, prompt, chunk)
                yield {**row, "prompt": number}
        if chunk is None and options.at_once:
            yield throughput(llm, options, tokens)


def main(arguments: Sequence[str] | None = None) -> None:
    """Start the engine, measure."""
    options = parse(arguments)
    start = time.perf_counter()
    llm = make_engine(options, **options.engine)
    started = time.perf_counter() - start
    import vllm

    model = options.shape or Path(options.model).name
    common = {"model": model, "layers": options.layers, "run": options.run, "method": described(options)}
    common |= {"gpus": options.tensor_parallel, "dtype": options.dtype, "device": device_name(), "start_seconds": started}
    cache = llm.llm_engine.vllm_config.cache_config
    common |= {"cache_tokens": (cache.num_gpu_blocks or 0) * cache.block_size}
    common |= {"vllm": vllm.__version__, "torch": torch.__version__}
    if options.turns:
        wait_for_engines(options.turns, options.engines)
    for row in rows(llm, options):
        append_row(options.json, {**common, **row})
        print({**common, **row}, flush=True)


if __name__ == "__main__":
    main()
