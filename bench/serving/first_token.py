"""Time to first token and throughput of a vLLM engine: ``python -m bench.serving.first_token --model FOLDER --json FILE``.

One engine a process, with the stock backend (``--stock``) or with the plug-in, as vLLM runs it: compiled, with CUDA graphs.
Rows are appended to ``--json``; `bench.serving.table` compares them. ``--wait FILE`` starts measuring when that file is there, so
that engines that share a GPU can start together and be measured one after the other.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from bench.measure.random_blocks import random_blocks_mask
from bench.measure.results import device_name
from bench.measure.stages import kernels_of
from bench.prompts.models import SHAPES
from bench.serving.compilations import Compilations
from bench.serving.engine import PROFILED, append, described, make_engine, set_density


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--model", help="folder of a model")
    which.add_argument("--shape", choices=sorted(SHAPES), help="this model's shape, with random weights")
    parser.add_argument("--layers", type=int, help="with --shape: fewer layers than the model has")
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--stock", action="store_true", help="vLLM's FLASH_ATTN, without the plug-in")
    how.add_argument(
        "--density", type=float, nargs="+", default=[], help="force these with random blocks, one if over several GPUs"
    )
    how.add_argument("--budget", type=int, help="FlexPrefill with this budget in tokens as its floor and, unless hybrid, its cap")
    parser.add_argument("--gamma", type=float, default=0.9)
    parser.add_argument("--selection", default="coverage")
    parser.add_argument("--dense-below", type=int, default=16384)
    parser.add_argument("--prompt-tokens", type=int, nargs="+", default=[32768, 65536, 131072])
    parser.add_argument("--chunks", type=int, nargs="*", default=[], help="also prefill in chunks of so many tokens")
    parser.add_argument("--chunked-from", type=int, default=0, help="only prompts of at least so many tokens in chunks")
    parser.add_argument("--profile", action="store_true", help="also say which kernels take the time of the longest prompt")
    parser.add_argument("--prefills", type=int, default=3, help="prefills that the median is taken over, after the first")
    parser.add_argument("--at-once", type=int, default=0, help="also measure throughput with so many prompts at a time")
    parser.add_argument("--at-once-tokens", type=int, nargs="+", help="only with prompts of these lengths")
    parser.add_argument("--new-tokens", type=int, default=32, help="tokens a prompt in the measurement of throughput")
    parser.add_argument("--utilization", type=float, default=0.9, help="share of the GPU's memory, as vLLM's")
    parser.add_argument("--cache-gb", type=float, help="GiB of KV cache; default: what vLLM finds to be left")
    parser.add_argument("--tensor-parallel", type=int, default=1)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--wait", type=Path, help="file to wait for between the start of the engine and the first request")
    parser.add_argument("--done", type=Path, help="file to make at the end, whatever the end is")
    parser.add_argument("--run", help="a name: only rows of the same one are compared")
    parser.add_argument("--json", type=Path, required=True)
    return parser.parse_args(arguments)


def prompts(options: argparse.Namespace, tokens: int, number: int) -> list[list[int]]:
    """Return `number` different prompts: needles for a model, random tokens for a shape."""
    if options.model:
        from bench.retriever.task import make_prompt

        return [make_prompt(tokens, 16, 1, seed).token_ids.tolist() for seed in range(number)]
    vocabulary = SHAPES[options.shape][1]["vocab_size"]
    return [random.Random(seed).choices(range(1000, vocabulary), k=tokens) for seed in range(number)]


def generate(llm: Any, asked: list[list[int]], new_tokens: int) -> tuple[float, list[Any]]:
    """Seconds until all are done, and vLLM's outputs."""
    from vllm import SamplingParams

    given = SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True, detokenize=False)
    start = time.perf_counter()
    outputs = llm.generate([{"prompt_token_ids": each} for each in asked], given, use_tqdm=False)
    seconds = time.perf_counter() - start
    return seconds, outputs


def random_density(tokens: int, rows: int, density: float, options: argparse.Namespace) -> float:
    """Kept share of the visible blocks in one head of the random masks of a prompt's last chunk."""
    like = {"dtype": getattr(torch, options.dtype), "device": options.device}
    query, key = torch.zeros(1, 1, rows, 16, **like), torch.zeros(1, 1, tokens, 16, **like)
    kept, seen = (random_blocks_mask(query, key, density=share) for share in (density, 1.0))
    return float(_blocks(kept) / _blocks(seen))


def _blocks(mask: BlockMask) -> Tensor:
    full = mask.full_kv_num_blocks
    return mask.kv_num_blocks.sum() + (0 if full is None else full.sum())


class Counted:
    """Tokens and density that the plug-in counted since this was made; nothing where the engine runs elsewhere."""

    def __init__(self) -> None:
        from flexmask.integrations.vllm.counters import COUNTERS

        COUNTERS.reset()
        self._counters = COUNTERS

    def fields(self) -> dict[str, Any]:
        """The figures."""
        counts = self._counters
        return {"sparse_tokens": counts.sparse_tokens, "dense_tokens": counts.dense_tokens, "density": counts.density}


def budget(llm: Any, tokens: int) -> None:
    """Rows of a step at most, which vLLM reads in every step."""
    core = getattr(llm.llm_engine.engine_core, "engine_core", None)
    if core is None:
        raise ValueError("--chunks needs the engine in this process: one GPU")
    core.scheduler.max_num_scheduled_tokens = tokens


def measure(llm: Any, options: argparse.Namespace, tokens: int, chunk: int | None, row: dict[str, Any]) -> dict[str, Any]:
    """Measure one length: the first request by itself, then the median of those after it."""
    asked = prompts(options, tokens, 1)
    on_gpu = options.device == "cuda" and options.tensor_parallel == 1
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    counted = Counted()
    with Compilations() as compiled:
        first, _ = generate(llm, asked, 1)
    times = [generate(llm, asked, 1)[0] for _ in range(1 if chunk else options.prefills)]
    row = {**row, "prompt_tokens": tokens, "chunk": chunk, "seconds": statistics.median(times), "first_seconds": first}
    row |= {"all_seconds": times, "compiled_by_first": compiled.number, "compiled": compiled.names}
    row |= {**counted.fields(), **({"density": row["density"]} if "density" in row else {})}
    if options.tensor_parallel > 1:  # the workers are processes of their own, and nothing of what they do is seen here
        row |= dict.fromkeys(("compiled_by_first", "compiled", "sparse_tokens", "dense_tokens"))
    if on_gpu:
        row |= {"peak_gb": torch.cuda.max_memory_allocated() / 1e9, "profiled_gb": PROFILED.get("gb"), "cache_gb": cache_gb(llm)}
    return row


def cache_gb(llm: Any) -> float:
    """Memory of the KV cache."""
    layers = llm.llm_engine.vllm_config.compilation_config.static_forward_context.values()
    caches = [each.kv_cache for each in layers if getattr(each, "kv_cache", None) is not None]
    tensors = [each for cache in caches for each in (cache if isinstance(cache, (list, tuple)) else [cache])]
    return sum({each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in tensors}.values()) / 1e9


def profile(llm: Any, options: argparse.Namespace, tokens: int, row: dict[str, Any]) -> dict[str, Any]:
    """Milliseconds on the GPU by kernel in one prefill, the heaviest first; on a GPU in this process."""
    asked = prompts(options, tokens, 1)
    found: dict[str, float] = {}
    for name, microseconds in kernels_of(lambda: generate(llm, asked, 1)):
        found[name[:120]] = found.get(name[:120], 0.0) + microseconds / 1e3
    heaviest = sorted(found, key=lambda name: -found[name])
    kernels = {name: round(found[name], 2) for name in heaviest[:40]}
    return {**row, "prompt_tokens": tokens, "kernels_ms": kernels, "all_kernels_ms": sum(found.values())}


def throughput(llm: Any, options: argparse.Namespace, tokens: int, row: dict[str, Any]) -> dict[str, Any]:
    """Measure several prompts at a time with the tokens after them."""
    asked = prompts(options, tokens, options.at_once)
    seconds, outputs = generate(llm, asked, options.new_tokens)
    total = options.at_once * (tokens + options.new_tokens)
    fields = {"prompt_tokens": tokens, "at_once": options.at_once, "new_tokens": options.new_tokens}
    # what `vllm bench serve` tells of requests that all come at once
    times = [each.metrics for each in outputs]
    first = [each.first_token_latency for each in times]
    after = [(each.last_token_ts - each.first_token_ts) / max(each.num_generation_tokens - 1, 1) for each in times]
    latencies = {"first_token_seconds": first, "seconds_a_token_after": after}
    return {**row, **fields, "seconds": seconds, "tokens_per_second": total / seconds, **latencies}


def measure_all(llm: Any, options: argparse.Namespace, common: dict[str, Any], density: float | None) -> Iterator[dict[str, Any]]:
    """Measure everything that is wanted, with random blocks of this density; what is wanted besides, with the first density."""
    common, first = {**common, "method": described(options, density)}, density in (None, *options.density[:1])
    if density is not None and options.tensor_parallel == 1:
        set_density(density)
    for tokens in options.prompt_tokens:
        chunks = [each for each in options.chunks if first and each < tokens and tokens >= options.chunked_from]
        for chunk in (None, *chunks):
            if options.tensor_parallel == 1:
                budget(llm, chunk or max(options.prompt_tokens))
            # the plug-in counts FlexPrefill's masks only
            known = {} if density is None else {"density": random_density(tokens, chunk or tokens, density, options)}
            yield measure(llm, options, tokens, chunk, {**common, **known})
        if options.tensor_parallel == 1:
            budget(llm, max(options.prompt_tokens))
        if first and options.at_once and tokens in (options.at_once_tokens or options.prompt_tokens):
            yield throughput(llm, options, tokens, common)
    if first and options.profile and options.device == "cuda" and options.tensor_parallel == 1:
        yield profile(llm, options, max(options.prompt_tokens), common)


def main(arguments: Sequence[str] | None = None) -> None:
    """Start the engine, wait if told to, measure."""
    options = parse(arguments)
    try:
        start = time.perf_counter()
        llm = make_engine(options, max(options.prompt_tokens), Path(tempfile.mkdtemp()))
        started = time.perf_counter() - start
        while options.wait and not options.wait.exists():
            time.sleep(0.1)
        import vllm

        common = {"model": options.model or options.shape, "layers": options.layers, "run": options.run}
        common |= {"gpus": options.tensor_parallel, "dtype": options.dtype, "device": device_name(), "start_seconds": started}
        common |= {"vllm": vllm.__version__, "torch": torch.__version__}
        for density in options.density or [None]:
            for row in measure_all(llm, options, common, density):
                append(options.json, row)
                print(row, flush=True)
    finally:
        if options.done:
            options.done.touch()


if __name__ == "__main__":
    main()
