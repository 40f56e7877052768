"""A vLLM engine of the command line of `bench.serving.first_token`, its prompts, and what it counts."""

from __future__ import annotations

import argparse
import itertools
import os
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from bench.fidelity.texts import read
from bench.prompts.models import SHAPES, shape_config
from bench.speed import random_blocks as random_blocks  # registers its method

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
