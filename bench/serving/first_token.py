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
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from bench.measure.random_blocks import random_blocks_mask
from bench.measure.results import device_name
from bench.prompts.models import SHAPES
from bench.serving.compilations import Compilations
from bench.serving.engine import append, described, make_engine


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--model", help="folder of a model")
    which.add_argument("--shape", choices=sorted(SHAPES), help="this model's shape, with random weights")
    parser.add_argument("--layers", type=int, help="with --shape: fewer layers than the model has")
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--stock", action="store_true", help="vLLM's FLASH_ATTN, without the plug-in")
    how.add_argument("--density", type=float, help="force this density with random blocks")
    parser.add_argument("--gamma", type=float, default=0.9)
    parser.add_argument("--selection", default="coverage")
    parser.add_argument("--dense-below", type=int, default=16384)
    parser.add_argument("--prompt-tokens", type=int, nargs="+", default=[32768, 65536, 131072])
    parser.add_argument("--chunks", type=int, nargs="*", default=[], help="also prefill in chunks of so many tokens")
    parser.add_argument("--prefills", type=int, default=3, help="prefills that the median is taken over, after the first")
    parser.add_argument("--at-once", type=int, default=0, help="also measure throughput with so many prompts at a time")
    parser.add_argument("--new-tokens", type=int, default=32, help="tokens a prompt in the measurement of throughput")
    parser.add_argument("--utilization", type=float, default=0.9, help="share of the GPU's memory, as vLLM's")
    parser.add_argument("--cache-gb", type=float, help="GiB of KV cache; default: what vLLM finds to be left")
    parser.add_argument("--tensor-parallel", type=int, default=1)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--wait", type=Path, help="file to wait for between the start of the engine and the first request")
    parser.add_argument("--done", type=Path, help="file to make at the end, whatever the end is")
    parser.add_argument("--json", type=Path, required=True)
    return parser.parse_args(arguments)


def prompts(options: argparse.Namespace, tokens: int, number: int) -> list[list[int]]:
    """Return `number` different prompts: needles for a model, random tokens for a shape."""
    if options.model:
        from bench.retriever.task import make_prompt

        return [make_prompt(tokens, 16, 1, seed).token_ids.tolist() for seed in range(number)]
    vocabulary = SHAPES[options.shape][1]["vocab_size"]
    return [random.Random(seed).choices(range(1000, vocabulary), k=tokens) for seed in range(number)]


def generate(llm: Any, asked: list[list[int]], new_tokens: int) -> tuple[float, list[list[int]]]:
    """Seconds until all are done, and their tokens."""
    from vllm import SamplingParams

    given = SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True, detokenize=False)
    start = time.perf_counter()
    outputs = llm.generate([{"prompt_token_ids": each} for each in asked], given, use_tqdm=False)
    seconds = time.perf_counter() - start
    return seconds, [list(each.outputs[0].token_ids) for each in outputs]


def random_density(tokens: int, rows: int, options: argparse.Namespace) -> float:
    """Kept share of the visible blocks in one head of the random masks of a prompt's last chunk."""
    like = {"dtype": getattr(torch, options.dtype), "device": options.device}
    query, key = torch.zeros(1, 1, rows, 16, **like), torch.zeros(1, 1, tokens, 16, **like)
    kept, seen = (random_blocks_mask(query, key, density=share) for share in (options.density, 1.0))
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


def measure(llm: Any, options: argparse.Namespace, tokens: int, chunk: int | None, common: dict[str, Any]) -> dict[str, Any]:
    """Measure one length: the first request by itself, then the median of those after it."""
    asked = prompts(options, tokens, 1)
    on_gpu = options.device == "cuda" and options.tensor_parallel == 1
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    counted = Counted()
    with Compilations() as compiled:
        first, _ = generate(llm, asked, 1)
    times = [generate(llm, asked, 1)[0] for _ in range(options.prefills)]
    row = {**common, "prompt_tokens": tokens, "chunk": chunk, "seconds": statistics.median(times), "first_seconds": first}
    row |= {"all_seconds": times, "compiled_by_first": compiled.number, "compiled": compiled.names, **counted.fields()}
    if options.density is not None:  # the plug-in counts FlexPrefill's masks only
        row["density"] = random_density(tokens, chunk or tokens, options)
    row["peak_gb"] = torch.cuda.max_memory_allocated() / 1e9 if on_gpu else None
    return row


def throughput(llm: Any, options: argparse.Namespace, tokens: int, common: dict[str, Any]) -> dict[str, Any]:
    """Measure several prompts at a time with the tokens after them."""
    asked = prompts(options, tokens, options.at_once)
    seconds, _ = generate(llm, asked, options.new_tokens)
    total = options.at_once * (tokens + options.new_tokens)
    fields = {"prompt_tokens": tokens, "at_once": options.at_once, "new_tokens": options.new_tokens}
    return {**common, **fields, "seconds": seconds, "tokens_per_second": total / seconds}


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

        common = {"model": options.model or options.shape, "layers": options.layers, "method": described(options)}
        common |= {"gpus": options.tensor_parallel, "dtype": options.dtype, "device": device_name(), "start_seconds": started}
        common |= {"vllm": vllm.__version__, "torch": torch.__version__}
        for tokens in options.prompt_tokens:
            for chunk in (None, *(each for each in options.chunks if each < tokens)):
                if options.tensor_parallel == 1:
                    budget(llm, chunk or max(options.prompt_tokens))
                row = measure(llm, options, tokens, chunk, common)
                append(options.json, row)
                print(row, flush=True)
            if options.at_once:
                row = throughput(llm, options, tokens, common)
                append(options.json, row)
                print(row, flush=True)
    finally:
        if options.done:
            options.done.touch()


if __name__ == "__main__":
    main()
