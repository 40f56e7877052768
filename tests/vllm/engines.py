"""The engines that tests start: options, models, environment and arguments of vLLM."""

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from tests.repository import ROOT
from tests.serving.programs import CHOSEN, ENGINE_ENVIRONMENT, QUESTIONS
from tests.vllm import random_models

MODEL = "bench/retriever/model"
ENVIRONMENT = {
    **ENGINE_ENVIRONMENT,
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    # otherwise vLLM sets a core aside
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}
# with it, processes find the plug-in for CPUs
CPU_PLUGIN = str(ROOT / "tests/vllm/cpu_plugin")
PYTHONPATH = os.pathsep.join([CPU_PLUGIN, str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
ON_CUDA = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    # 1 would need a package that the engine can do without
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
}
MAX_TOKENS, PAGE = 8192, 32
# so few that the two requests of `preempted` do not fit to their end
PAGES = 264
KEEP_ALL = {"gamma": 1.0, "block_size": 64, "dense_below": 0}
SPARSE = {"gamma": 0.9, "block_size": 64, "min_budget": 128, "dense_below": 0}
# keeps so little that answers of a model of random weights are far from those of dense attention
HALF = {**SPARSE, "gamma": 0.5, "min_budget": 64}
BY_HEAD = {**SPARSE, "gamma": [0.6, 0.98, 0.7, 0.9, 0.95, 0.6, 1.0, 0.8]}


# questions to random models, as `QUESTIONS`: rows, beginnings and ends of prompts, new tokens
WHOLE = {"whole": (MAX_TOKENS, [(0, 1500), (0, 700)], 4), "odd_chunks": (333, [(0, 1500)], 4)}
_PROMPTS = [(0, 1500), (0, 40), (0, 700), (300, 330), (100, 900)]
LATENT = {"whole": (MAX_TOKENS, _PROMPTS, 6), "odd_chunks": (333, _PROMPTS[:3], 6)}
# chunks of more than the 512 rows that FLASH_ATTN_MLA decodes
LATENT_ON_CUDA = {**LATENT, "odd_chunks": (605, _PROMPTS[:3], 6)}
# chunks longer than one page of a mixture and shorter than two, and a prompt whose beginning may be cached
MIXED = {"chunks": (777, [(0, 1700), (0, 700), (5, 45)], 6)}
SPARSELY = ("whole", "chunks", "odd_chunks", "mixed")
SHORTLY = ("odd_chunks", "mixed_at_one")
ALL = (*SPARSELY, "rechunked", "short", "prefix_hits", "preempted", "aborted")


class Engine(NamedTuple):
    """Options of flexmask (None: the stock backend), questions by name, and more arguments of vLLM."""

    options: dict[str, Any] | None
    asks: tuple[str, ...] = ALL
    model: Callable[[Path], str] | None = None  # writes one; None: the retriever
    questions: Mapping[str, Any] = QUESTIONS
    ranks: int = 1
    rows: int = MAX_TOKENS  # most of a step; fewer than all cannot be changed
    kernel: str = "FLASH_ATTN"
    arguments: Mapping[str, Any] = {}
    faults: tuple[str, ...] = ()
    is_wrong: bool = False  # later chunks miss a token, in all processes
    pages: str | None = None  # a folder of cached pages, beside what engines write


_GRAPHS: dict[str, Any] = {"compilation_config": {"cudagraph_capture_sizes": [1, 2, 4, 8, 16, 64, 256, 512, 1024]}}
_FP8: dict[str, Any] = {"kv_cache_dtype": "fp8"}
# features that a server may turn on
_BY_NGRAMS = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 4}
# the model is its own draft, whose prefills are dense
_BY_A_DRAFT = {"method": "draft_model", "model": MODEL, "num_speculative_tokens": 3}
GUESSED: tuple[tuple[str, int, dict[str, Any]], ...] = (
    ("guessed", 777, {"speculative_config": _BY_NGRAMS, "disable_log_stats": False}),
    # a row of each step is the draft's
    ("drafted", 778, {"speculative_config": _BY_A_DRAFT, "disable_log_stats": False}),
)
# traced, because vLLM's later stages cannot start without a warm-up, which eager models on CPUs do not have
_TRACED: dict[str, Any] = {"enforce_eager": False, "compilation_config": {"mode": 2, "backend": "eager"}}
_STAGES: dict[str, Any] = {"tensor_parallel_size": 1, "pipeline_parallel_size": 2, **_TRACED}
# a model with the retriever's tokenizer
_SEEING: dict[str, Any] = {"skip_tokenizer_init": False, "max_model_len": MAX_TOKENS}
# one adapter more than requests use: vLLM's operators for CPUs give requests without an adapter the last one
_ADAPTERS: dict[str, Any] = {"enable_lora": True, "max_loras": 3, "max_lora_rank": 8}
# vLLM's own operator for CPUs rotates latent queries of several heads wrongly
_NATIVE_ROPE: dict[str, Any] = {"compilation_config": {"custom_ops": ["-rotary_embedding"]}}


def _latent(options, **others):
    return Engine(options, tuple(LATENT), random_models.deepseek, LATENT, arguments=_NATIVE_ROPE, **others)


def _random(options, model):
    return Engine(options, tuple(WHOLE), model, WHOLE)


# models whose layers are of several kinds. On CPUs Mamba 2 keeps no states inside a prompt, which cached prefixes need, and gated
# delta nets take bfloat16 only
MIXTURES: dict[str, tuple[Callable[[Path], str], dict[str, Any]]] = {
    "nemotron": (random_models.nemotron_h, {"enable_prefix_caching": False}),
    "granite": (random_models.granite, {"enable_prefix_caching": False}),
    "gemma4": (random_models.gemma4, {"enable_prefix_caching": False}),
    "qwen3_next": (random_models.qwen3_next, {"enable_prefix_caching": True, "dtype": "bfloat16"}),
    "qwen3_5": (random_models.qwen3_5, {"enable_prefix_caching": True, "dtype": "bfloat16"}),
}


ENGINES = {
    "stock": Engine(None, (*ALL, *CHOSEN)),
    "keep_all": Engine(KEEP_ALL, faults=("another_page", "offset_off_by_one")),
    "sparse": Engine(SPARSE, (*ALL, *CHOSEN)),
    "half": Engine({**SPARSE, "gamma": 0.5}, ("beside_each_other_plainly",)),
    "flexprefill": Engine({**SPARSE, "method": "flexprefill"}, SPARSELY),
    "by_head": Engine(BY_HEAD, ("whole", "odd_chunks")),
    # here vLLM measures memory before it makes the builder
    "compiled": Engine(KEEP_ALL, arguments={"enforce_eager": False}),
    # on a GPU: chunks in graphs that are larger than they are
    "graphs": Engine(KEEP_ALL, arguments=_GRAPHS),
    "graphs_sparse": Engine(SPARSE, SPARSELY, arguments=_GRAPHS),
    "triton_stock": Engine(None, kernel="TRITON_ATTN"),
    "triton": Engine({**KEEP_ALL, "kernel": "TRITON_ATTN"}),
    # on two GPUs, in chunks of 777
    "two_ranks": Engine(BY_HEAD, ("odd_chunks",), ranks=2, rows=777),
    "stock_on_two": Engine(None, ("odd_chunks", "mixed"), ranks=2, rows=777),
    "keep_all_on_two": Engine(KEEP_ALL, ("odd_chunks", "mixed"), ranks=2, rows=777),
    # every other layer has a window; all have a soft cap, or sinks
    "windows_stock": _random(None, random_models.gemma),
    "windows": _random(KEEP_ALL, random_models.gemma),
    "sinks_stock": _random(None, random_models.gpt_oss),
    "sinks": _random(KEEP_ALL, random_models.gpt_oss),
    # sinks in the layers with windows
    "both_stock": _random(None, random_models.laguna),
    "both": _random(KEEP_ALL, random_models.laguna),
    "fp8_stock": Engine(None, ("odd_chunks", "mixed"), rows=777, arguments=_FP8),
    "fp8": Engine(KEEP_ALL, ("odd_chunks", "mixed"), rows=777, arguments=_FP8),
    # whole prompts at once, and in chunks
    "latent_stock": _latent(None, kernel="FLASH_ATTN_MLA"),
    "latent": _latent(KEEP_ALL),
    "latent_sparse": _latent(SPARSE),
    "latent_half": _latent(HALF),
    **{
        f"{name}{suffix}": Engine(options, ("chunks", "longer"), model, MIXED, arguments=arguments, faults=faults)
        for name, (model, arguments) in MIXTURES.items()
        for suffix, options, faults in (("_stock", None, ()), ("", KEEP_ALL, ("second_page_twice",)), ("_half", HALF, ()))
    },
    # one server prefills, and a stock one takes its pages and decodes
    **{
        f"{kind}_{part}": Engine(options if part == "prefills" else None, ("handed",), pages=kind)
        for kind, options in (("keep_all", KEEP_ALL), ("sparse", SPARSE))
        for part in ("prefills", "decodes")
    },
    **{
        name: Engine(SPARSE, (*SHORTLY, "guesses"), rows=rows, arguments=arguments, faults=("offset_off_by_one",))
        for name, rows, arguments in GUESSED
    },
    "two_stages": Engine(SPARSE, SHORTLY, ranks=2, rows=777, arguments=_STAGES),
    "two_stages_wrong": Engine(SPARSE, ("odd_chunks",), ranks=2, rows=777, arguments=_STAGES, is_wrong=True),
    "adapters_stock": Engine(None, ("adapters",), arguments=_ADAPTERS),
    "adapters": Engine(SPARSE, ("adapters",), arguments=_ADAPTERS),
    "seeing_stock": Engine(None, ("pictured",), random_models.seeing, arguments=_SEEING),
    "seeing": Engine(SPARSE, ("odd_chunks", "pictured"), random_models.seeing, arguments=_SEEING, faults=("offset_off_by_one",)),
    "merged": Engine(SPARSE, ("alone",), random_models.merged),
    # on a GPU
    "latent_triton_stock": _latent(None, kernel="TRITON_MLA"),
    "latent_triton": _latent({**KEEP_ALL, "kernel": "TRITON_ATTN"}),
    "latent_triton_half": _latent({**HALF, "kernel": "TRITON_ATTN"}),
}


def on_cpu(options, is_latent=False):
    """Environment and arguments of an engine in float32, eager."""
    environment = ENVIRONMENT if options is None else {**ENVIRONMENT, "PYTHONPATH": PYTHONPATH}
    # where CPUs have AMX, vLLM chooses AMX_MLA, which takes no float32
    backend = {"attention_backend": "CPU_MLA"} if is_latent else {}
    return environment, {"dtype": "float32", "enforce_eager": True, **backend}


def on_cuda(options, kernel):
    """Environment and arguments of an engine in bfloat16, compiled, with CUDA graphs, and so little memory that several fit."""
    backend = kernel if options is None else "CUSTOM"
    memory = {"gpu_memory_utilization": 0.1, "kv_cache_memory_bytes": 2**30}
    # gated delta nets without FlashInfer's kernels
    return ON_CUDA, {"dtype": "bfloat16", "attention_backend": backend, "gdn_prefill_backend": "triton", **memory}
