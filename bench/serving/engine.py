"""A vLLM engine in this process: a model or a shape with random weights, with the stock backend or with the plug-in."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from bench.measure.random_blocks import random_blocks_mask
from bench.prompts.models import SHAPES

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
RANDOM_BLOCKS = "random_blocks"


def serving_options(options: argparse.Namespace) -> dict[str, Any] | None:
    """Options as a user would write them under "flexmask"; None for the stock backend."""
    if options.stock:
        return None
    if options.density:
        # random weights have no density of their own worth a figure. FlexPrefill's own search takes less memory a head
        forced = {"method_options": {"density": options.density[0]}, "max_mask_bytes": 2**31}
        return {"method": RANDOM_BLOCKS, **forced, "dense_below": options.dense_below}
    kept = {"gamma": options.gamma}
    if options.budget and options.selection == "hybrid":
        # which takes no cap; what random weights attend to is nowhere enough for its thresholds
        kept |= {"min_budget": options.budget}
    elif options.budget:
        # random weights would make every head query-aware, which adds blocks to the lines
        kept |= {"min_budget": options.budget, "max_budget": options.budget, "tau": 0.0}
    return {**kept, "selection": options.selection, "dense_below": options.dense_below}


def shape_folder(shape: str, folder: Path, layers: int | None) -> str:
    """Write the config of a known shape, in Llama's or Qwen's own form, for ``load_format="dummy"``."""
    from transformers import AutoConfig

    family, sizes = SHAPES[shape]
    config = AutoConfig.for_model(family.lower(), **{**sizes, **({"num_hidden_layers": layers} if layers else {})})
    config.architectures = [f"{family}ForCausalLM"]
    config.dtype = "bfloat16"
    folder.mkdir(parents=True, exist_ok=True)
    config.save_pretrained(folder)
    return str(folder)


def make_engine(options: argparse.Namespace, most_tokens: int, folder: Path) -> Any:
    """Start the engine that the command line describes; the whole of the longest prompt fits into one step."""
    os.environ.update(ENVIRONMENT)
    if options.tensor_parallel == 1:
        # the engine in this process: its memory and what it compiles can be looked at
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    ours = serving_options(options)
    on_cpu = options.device == "cpu"
    if on_cpu:
        os.environ.update(ON_CPU if ours is None else {**ON_CPU, "FLEXMASK_VLLM_CPU": "1"})
    from vllm import LLM

    offer_random_blocks()
    if not on_cpu and options.tensor_parallel == 1:
        _note_profiled_peak()
    own = (
        {"model": options.model}
        if options.model
        else {
            "model": shape_folder(options.shape, folder, options.layers),
            "load_format": "dummy",
            "skip_tokenizer_init": True,
        }
    )
    memory = {"gpu_memory_utilization": options.utilization}
    if options.cache_gb:
        memory["kv_cache_memory_bytes"] = int(options.cache_gb * 2**30)
    where = {} if on_cpu else {"attention_backend": "FLASH_ATTN" if ours is None else "CUSTOM", **memory}
    return LLM(
        **own,
        **where,
        dtype=options.dtype,
        seed=0,
        enforce_eager=on_cpu,
        max_model_len=most_tokens + options.new_tokens,
        max_num_batched_tokens=most_tokens,
        max_num_seqs=max(options.at_once, 2),
        # each prompt is prefilled as often as it is asked
        enable_prefix_caching=False,
        # throughput comes with the times of every request
        disable_log_stats=not options.at_once,
        tensor_parallel_size=options.tensor_parallel,
        additional_config={} if ours is None else {"flexmask": ours},
        **({"distributed_executor_backend": "uni"} if options.tensor_parallel == 1 else {}),
    )


def offer_random_blocks() -> None:
    """Let the plug-in's option `method` name a mask of any density, in this process.

    Tensor parallelism runs in processes of its own: there an entry point ``vllm.general_plugins`` must call this.
    """
    from flexmask.block_masks import MASKS

    MASKS[RANDOM_BLOCKS] = _random_blocks


# instead of the option, once it is set
_SHARE: dict[str, float] = {}


def set_density(density: float) -> None:
    """Let random blocks have this density from now on: one engine serves all of them."""
    _SHARE["density"] = density


def _random_blocks(query: Tensor, key: Tensor, *, density: float, **options: Any) -> BlockMask:
    return random_blocks_mask(query, key, density=_SHARE.get("density", density), **options)


PROFILED: dict[str, float] = {}


def _note_profiled_peak() -> None:
    """Keep the memory of torch's at most while vLLM measured it, before the cache was there: what its accounting goes by."""
    import torch

    try:
        from vllm.v1.worker.gpu_worker import Worker
    except ImportError:
        return
    measured = Worker.determine_available_memory

    def determine_available_memory(worker: Any) -> Any:
        available = measured(worker)
        PROFILED["gb"] = torch.cuda.max_memory_allocated() / 1e9
        return available

    Worker.determine_available_memory = determine_available_memory


def described(options: argparse.Namespace, density: float | None = None) -> str:
    """Name the attention in a table."""
    if options.stock:
        return "stock"
    if density is not None:
        return f"random blocks, {density:g}"
    kept = f"{options.budget:,} tokens" if options.budget else f"gamma {options.gamma:g}"
    return f"FlexPrefill, {kept}" if options.selection == "coverage" else f"FlexPrefill, {options.selection}, {kept}"


def append(path: Path, row: dict[str, Any]) -> None:
    """Add one line, at once: a run that is cut off keeps what it has measured."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")
