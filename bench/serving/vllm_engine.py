"""A vLLM engine of the command line of `bench.serving.first_token`, and what it counts."""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path
from typing import Any

from bench.serving.prompts import model_folder
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

    given: dict[str, Any] = {
        "model": model_folder(options),
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
    }
    if options.shape:
        given |= {"load_format": "dummy", "skip_tokenizer_init": True}
    if not on_cpu:
        backend = "FLASH_ATTN" if options.stock else "CUSTOM"
        given |= {"attention_backend": backend, "gpu_memory_utilization": options.utilization}
    if options.tensor_parallel == 1:
        given["distributed_executor_backend"] = "uni"
    return LLM(**{**given, **others})


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
