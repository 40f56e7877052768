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
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from bench.fidelity.texts import read
from bench.prompts.models import SHAPES, shape_config
from bench.rows import append_row
from bench.speed import random_blocks as random_blocks  # registers its method
from bench.speed.clock import device_name
from flexmask.json_settings import json_data

# vLLM reads them when it is imported
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    # a package that the engine does without
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    # a process that has looked at the GPU must not be forked
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
}
# for trying the program out
ON_CPU = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
CPU_PLUGIN = str(Path(__file__).parents[2] / "tests/vllm/cpu_plugin")


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--model", help="folder of a model")
    which.add_argument("--shape", choices=sorted(SHAPES), help="this model's shape, with random weights")
    parser.add_argument("--layers", type=int, help="with --shape: fewer layers than the model has")
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--stock", action="store_true", help="vLLM's FLASH_ATTN, without the plug-in")
    how.add_argument("--settings", type=json_data, default={}, help='JSON like \'{"method": "random_blocks", "density": 0.2}\'')
    parser.add_argument("--prompt-tokens", type=int, nargs="+", default=[32768, 65536, 131072])
    parser.add_argument("--texts", type=Path, help="with --model: prompts are the beginnings of these texts")
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


def shape_folder(shape: str, folder: Path, layers: int | None) -> str:
    """Write the config of a known shape, in its family's own form, for ``load_format="dummy"``."""
    config = shape_config(shape, layers)
    config.dtype = "bfloat16"
    config.save_pretrained(folder)
    return str(folder)


def make_engine(options: argparse.Namespace, **others: Any) -> Any:
    """Start the engine that the command line describes; the whole of the longest prompt fits into one step.

    `others` are arguments of ``vllm.LLM``, which replace those above.
    """
    os.environ.update(ENVIRONMENT)
    if options.tensor_parallel == 1:
        # the engine in this process: its memory and what it compiles can be looked at
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    on_cpu, most = options.device == "cpu", max(options.prompt_tokens)
    if on_cpu:
        os.environ.update(ON_CPU)
        if not options.stock:
            sys.path.insert(0, CPU_PLUGIN)
    from vllm import LLM

    own = {"model": options.model}
    if options.shape:
        folder = shape_folder(options.shape, Path(tempfile.mkdtemp()), options.layers)
        own = {"model": folder, "load_format": "dummy", "skip_tokenizer_init": True}
    backend = "FLASH_ATTN" if options.stock else "CUSTOM"
    where = {} if on_cpu else {"attention_backend": backend, "gpu_memory_utilization": options.utilization}
    given = {
        **own,
        **where,
        "dtype": options.dtype,
        "seed": 0,
        "enforce_eager": on_cpu,
        "max_model_len": most + options.new_tokens,
        "max_num_batched_tokens": most,
        "max_num_seqs": max(options.at_once, 2) + (16 if options.rate else 0),
        # every request prefills its prompt
        "enable_prefix_caching": False,
        # throughput comes with the times of every request
        "disable_log_stats": not options.at_once,
        "tensor_parallel_size": options.tensor_parallel,
        "additional_config": {} if options.stock else {"flexmask": options.settings},
        **({"distributed_executor_backend": "uni"} if options.tensor_parallel == 1 else {}),
    }
    return LLM(**{**given, **others})


def prompts(options: argparse.Namespace, tokens: int, number: int) -> list[list[int]]:
    """Return `number` different prompts: beginnings of texts, or needles for a model and random tokens for a shape."""
    if options.texts:
        texts = itertools.cycle(read(options.texts, Path(options.model)).values())
        return [ids[:tokens].tolist() for ids in itertools.islice(texts, number)]
    if options.model:
        from bench.retriever.task import make_prompt

        return [make_prompt(tokens, 16, 1, seed).token_ids.tolist() for seed in range(number)]
    vocabulary = SHAPES[options.shape]["vocab_size"]
    return [random.Random(seed).choices(range(1000, vocabulary), k=tokens) for seed in range(number)]


def generate(llm: Any, asked: list[list[int]], new_tokens: int) -> tuple[float, list[Any]]:
    """Seconds until all are done, and vLLM's outputs."""
    from vllm import SamplingParams

    given = SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True, detokenize=False)
    start = time.perf_counter()
    outputs = llm.generate([{"prompt_token_ids": each} for each in asked], given, use_tqdm=False)
    return time.perf_counter() - start, outputs


def counted(llm: Any, options: argparse.Namespace) -> Any:
    """The plug-in's counters, from zero; None where the engine runs elsewhere or without it."""
    if options.stock or options.tensor_parallel > 1:
        return None
    from flexmask.integrations.vllm.engine import engine_of

    counters = engine_of(llm.llm_engine.vllm_config).counters
    counters.reset()
    return counters


def graphs() -> int:
    """Graphs that torch compiled so far in this process."""
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"])


def measure(llm: Any, options: argparse.Namespace, prompt: list[int], chunk: int | None) -> dict[str, Any]:
    """`measured`, in a turn."""
    with turn(options.turns):
        return measured(llm, options, prompt, chunk)


def measured(llm: Any, options: argparse.Namespace, prompt: list[int], chunk: int | None) -> dict[str, Any]:
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


def throughput(llm: Any, options: argparse.Namespace, tokens: int) -> dict[str, Any]:
    """Several prompts at a time with the tokens after them, as ``vllm bench serve`` says of requests that come at once."""
    seconds, outputs = generate(llm, prompts(options, tokens, options.at_once), options.new_tokens)
    total = options.at_once * (tokens + options.new_tokens)
    times = [each.metrics for each in outputs]
    row = {"prompt_tokens": tokens, "at_once": options.at_once, "new_tokens": options.new_tokens, "seconds": seconds}
    row |= {"tokens_per_second": total / seconds, "first_token_seconds": [each.first_token_latency for each in times]}
    after = [(each.last_token_ts - each.first_token_ts) / max(each.num_generation_tokens - 1, 1) for each in times]
    return {**row, "seconds_a_token_after": after}


def under_load(llm: Any, options: argparse.Namespace, tokens: int, chunk: int, number: int = 12) -> dict[str, Any]:
    """`number` prompts arrive at random while others decode: seconds to their first tokens, and between tokens of the others."""
    from vllm import SamplingParams

    engine, counters = llm.llm_engine, counted(llm, options)
    engine.engine_core.engine_core.scheduler.max_num_scheduled_tokens = chunk
    how = {"temperature": 0, "ignore_eos": True, "detokenize": False}
    decoding = [f"decodes {index}" for index in range(options.at_once)]
    for name, ids in zip(decoding, prompts(options, 1024, options.at_once), strict=True):
        given = SamplingParams(max_tokens=max(options.prompt_tokens) - 1024, **how)
        engine.add_request(name, {"prompt_token_ids": ids}, given)
    draw, asked = random.Random(0), prompts(options, tokens, number)
    arrivals = list(itertools.accumulate(draw.expovariate(options.rate) for _ in asked))
    gaps: list[float] = []
    waits: dict[str, float] = {}
    done, arrived, start, before = 0, 0, time.perf_counter(), 0.0
    while done < number:
        while arrived < number and arrivals[arrived] <= time.perf_counter() - start:
            given = SamplingParams(max_tokens=options.new_tokens, **how)
            engine.add_request(str(arrived), {"prompt_token_ids": asked[arrived]}, given)
            arrived += 1
        outputs = engine.step()
        now = time.perf_counter()
        if any(each.request_id in decoding for each in outputs):
            if before:  # not the first tokens of all
                gaps.append(now - before)
            before = now
        for each in (each for each in outputs if each.request_id not in decoding):
            waits.setdefault(each.request_id, now - start - arrivals[int(each.request_id)])
            done += each.finished
    engine.abort_request(decoding)
    parts = statistics.quantiles(gaps, n=100, method="inclusive")
    row = {"prompt_tokens": tokens, "chunk": chunk, "rate": options.rate, "decoding": options.at_once, "seconds": now - start}
    row |= {"first_token_seconds": list(waits.values()), "density": counters.density if counters else None}
    return row | {"gap_p50": parts[49], "gap_p95": parts[94], "gap_p99": parts[98], "gap_most": max(gaps)}


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
    for tokens in options.prompt_tokens:
        for number, prompt in enumerate(prompts(options, tokens, options.prompts)):
            yield {**measure(llm, options, prompt, None), "prompt": number}
        if options.at_once:
            yield throughput(llm, options, tokens)
    for chunk, tokens in itertools.product(options.chunks, options.prompt_tokens):
        if tokens > chunk:
            for number, prompt in enumerate(prompts(options, tokens, options.prompts)):
                yield {**measure(llm, options, prompt, chunk), "prompt": number}


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
