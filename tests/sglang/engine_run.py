"""One engine and its answers: ``python -m tests.sglang.engine_run ENGINE [fa3 | triton] OUT``.

SGLang starts processes for its models. Without a backend's name the engine runs on a CPU, with torch's operators as the stock
kernel; with one on a GPU. A test starts this program for each engine and compares the files.
"""

from __future__ import annotations

import functools
import importlib
import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from tests.repository import ROOT
from tests.serving import programs
from tests.serving.programs import CHOSEN, ENGINE_ENVIRONMENT, FAULT, prompt
from tests.vllm import random_models
from tests.vllm.engines import BY_HEAD, HALF, KEEP_ALL, MIXTURES, MODEL, SPARSE

# stand-ins for kernels, where conftest.py found none
_NAMES_ONLY = [str(ROOT / "tests/sglang/names_only")] if os.environ.get("SGLANG_USE_CPU_ENGINE") else []
# keeps PYTHONPATH, on which an engine may be
ENVIRONMENT = {
    **ENGINE_ENVIRONMENT,
    "PYTHONPATH": os.pathsep.join([str(ROOT), *_NAMES_ONLY, os.environ.get("PYTHONPATH", "")]),
}
CHUNK = 777
SAME = ("odd_chunks", "mixed", "short", "prefix_hits")
_OURS = {"prefill_attention_backend": "flexmask"}
_ON_CPU = {"device": "cpu", "dtype": "float32", "attention_backend": "torch_native", "disable_cuda_graph": True}
# several engines share the GPU, so each has its own ports, from this one on
_ON_GPU = {"device": "cuda", "dtype": "bfloat16", "sampling_backend": "pytorch", "port": 20000 + 2 * (os.getpid() % 10000)}


class Engine(NamedTuple):
    """Options of flexmask (None: the variable is not set), SGLang's arguments, the questions, and a fault to `plant`."""

    options: dict[str, Any] | None
    arguments: Mapping[str, Any]
    asks: tuple[str, ...] = SAME
    fault: str | None = None
    model: Callable[[Path], str] | None = None  # writes one of random weights; None: the retriever


_MIXTURES = {name: model for name, (model, _) in MIXTURES.items()}
_MIXTURES["qwen3_next"] = functools.partial(random_models.qwen3_next, dense_layers=())
# SGLang's default for Nemotron-H is FlashInfer, even for this model, which has no experts
_EXPERTS = {"nemotron": {"moe_runner_backend": "triton"}}

ENGINES = {
    "stock": Engine(None, {}, (*SAME, *CHOSEN)),
    "keep_all": Engine({**KEEP_ALL, "log_every": 0.001}, {**_OURS, "enable_metrics": True}),
    "sparse": Engine({**SPARSE, "log_every": 0.001}, _OURS, ("odd_chunks", *CHOSEN)),
    "by_head": Engine(BY_HEAD, _OURS, ("odd_chunks",)),
    "half": Engine({**SPARSE, "gamma": 0.5}, _OURS, ("beside_each_other_plainly",)),
    "fp8_stock": Engine(None, {"kv_cache_dtype": "fp8_e4m3"}, ("odd_chunks", "mixed")),
    "fp8": Engine(KEEP_ALL, {**_OURS, "kv_cache_dtype": "fp8_e4m3"}, ("odd_chunks", "mixed")),
    "two_stages": Engine(SPARSE, {**_OURS, "pp_size": 2}, ("odd_chunks", "mixed_at_one"), model=random_models.untied),
    "two_ranks": Engine(BY_HEAD, {**_OURS, "tp_size": 2}, ("odd_chunks",)),
    # the retriever's config.json holds its own gammas, for prompts from 16,384 tokens on
    "its_config": Engine(None, _OURS, ("odd_chunks",)),
    "wrong": Engine({"gama": 0.9}, _OURS, ()),
    # on a GPU
    **{
        f"{name}{suffix}": Engine(options, {**arguments, **_EXPERTS.get(name, {})}, ("text",), model=_MIXTURES[name])
        for name in ("qwen3_next", "qwen3_5", "nemotron", "granite")
        for suffix, options, arguments in (("_stock", None, {}), ("", KEEP_ALL, _OURS), ("_half", HALF, _OURS))
    },
    **{f"fault_{name}": Engine(KEEP_ALL, _OURS, ("odd_chunks",), name) for name in ("slots", "rows")},
}


def plant(fault: str) -> None:
    """Make the plug-in wrong in this process: cached keys are read one slot off, or queries are those of the row before."""
    backend: Any = importlib.import_module("flexmask.integrations.sglang.backend")
    shared: Any = importlib.import_module("flexmask.integrations.serving.engine")
    gathered, attend_chunk = backend.gathered, shared.attend_chunk
    if fault == "slots":
        backend.gathered = lambda buffer, slots: gathered(buffer, torch.cat([slots[:1], slots[:-1]]))
    else:
        shared.attend_chunk = lambda role, query, *rest, **options: attend_chunk(role, query.roll(1, 0), *rest, **options)


# SGLang's processes import this module, under another name
if os.environ.get(FAULT):
    plant(os.environ[FAULT])


def main(name: str, *backend_and_out: str) -> None:
    *kernel, out = backend_and_out
    engine = ENGINES[name]
    if engine.fault:
        os.environ[FAULT] = engine.fault
    os.environ.pop("FLEXMASK_SGLANG", None)
    if {"tp_size", "pp_size"} & engine.arguments.keys() and not kernel:
        # a core for each rank, which SGLang does not choose where there is one memory node
        os.environ["SGLANG_CPU_OMP_THREADS_BIND"] = "0|1"
    if engine.options is not None:
        os.environ["FLEXMASK_SGLANG"] = json.dumps(engine.options)
    import sglang

    common = {"model_path": MODEL, "random_seed": 0, "log_level": "info"}
    common |= {"context_length": 8192, "max_total_tokens": 20000, "max_running_requests": 8}
    common |= {"mem_fraction_static": 0.9 if kernel else 0.5}
    common |= {"chunked_prefill_size": CHUNK, "enable_mixed_chunk": True}
    common |= {**_ON_GPU, "attention_backend": kernel[0]} if kernel else _ON_CPU
    if engine.model is not None:
        common |= {"model_path": engine.model(Path(out).with_suffix(".model")), "skip_tokenizer_init": True}
    asked = Asked(sglang.Engine(**common, **engine.arguments))
    results = {each: asked.ask(each) for each in engine.asks}
    if "enable_metrics" in engine.arguments:
        results["metrics"] = metrics()
    Path(out).write_text(json.dumps(results), encoding="utf-8")
    asked.engine.shutdown()


class Asked(programs.Asked):
    def __init__(self, engine):
        self.engine = engine

    def generate(self, prompts, tokens=4, chosen=None, scored=True, regex=None):
        common = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True, "regex": regex}
        given = [{**common, "custom_params": each} for each in chosen or [None] * len(prompts)]
        logprobs = {"return_logprob": True, "logprob_start_len": 0 if scored else -1, "top_logprobs_num": 8}
        return [answer(each) for each in self.engine.generate(input_ids=prompts, sampling_params=given, **logprobs)]

    def text(self):
        """Of a random model."""
        return self.generate([random_models.prompt(0, 1700), random_models.prompt(0, 700)])

    def empty_cache(self):
        """SGLang refuses until its last step has ended, which may be after the answers."""
        while not self.engine.flush_cache().success:
            time.sleep(0.1)

    def short(self):
        """A prompt that does not fill a block."""
        return self.generate([prompt(40, seed=4)])


def answer(output):
    told = output["meta_info"]
    given = told["input_token_logprobs"]
    return {
        "tokens": list(output["output_ids"]),
        "logprobs": [{str(token): logprob for logprob, token, _ in step} for step in told["output_top_logprobs"]],
        "prompt_logprobs": [logprob for logprob, *_ in given[1:]] if len(given) > 1 else [],
        "cached": told["cached_tokens"],
    }


def metrics():
    """The plug-in's own, as the server's ``/metrics`` shows them."""
    from prometheus_client import CollectorRegistry
    from prometheus_client.multiprocess import MultiProcessCollector

    registry = CollectorRegistry()
    MultiProcessCollector(registry)
    samples = [each for family in registry.collect() for each in family.samples]
    return {each.labels["attention"]: each.value for each in samples if each.name == "flexmask:prefill_tokens_total"}


if __name__ == "__main__":
    main(*sys.argv[1:])
