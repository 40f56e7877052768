"""The entry point ``vllm.general_plugins: flexmask``: it registers the names in `backends`, and reads the options of requests.

vLLM's front end reads the options of single requests, and its model runner tells them to the engine.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable
from typing import Any

from flexmask.integrations.serving.options import RequestOptions, noted_options, prefix_key, request_options
from flexmask.integrations.serving.versions import faults_in
from flexmask.integrations.vllm.engine import CPU_VARIABLE, made_engine, serving_options

_BACKENDS = "flexmask.integrations.vllm.backends"
_log = logging.getLogger("vllm.flexmask")


def register() -> None:
    """Register sparse prefill as ``--attention-backend CUSTOM``; vLLM calls this in each of its processes, of whatever release.

    FLEXMASK_VLLM_CPU=1 overrides the CPU backends, where vLLM ignores the choice.
    """
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    custom = AttentionBackendEnum.CUSTOM
    path = f"{_BACKENDS}.Custom"
    if custom.is_overridden() and custom.get_path() != path:
        _log.warning("flexmask: attention backend CUSTOM is taken by %s and stays so", custom.get_path())
    else:
        register_backend(custom, path)
    if os.environ.get(CPU_VARIABLE) == "1":
        register_backend(AttentionBackendEnum.CPU_ATTN, f"{_BACKENDS}.SparseCPUAttention")
        # since 0.27
        if "CPU_MLA" in AttentionBackendEnum.__members__:
            register_backend(AttentionBackendEnum.CPU_MLA, f"{_BACKENDS}.SparseCPULatentAttention")
    read_requests()


def wrap_once(owner: Any, name: str, around: Callable[..., Any]) -> None:
    """Replace a function of a class by `around`, which gets the stock one first; once, as plug-ins may be loaded again."""
    stock = getattr(owner, name)
    if hasattr(stock, "flexmask_stock"):
        return

    @functools.wraps(stock)
    def wrapper(*arguments: Any, **options: Any) -> Any:
        return around(stock, *arguments, **options)

    wrapper.flexmask_stock = stock  # type: ignore[attr-defined]
    setattr(owner, name, wrapper)


def read_requests() -> None:
    """Make vLLM's front end refuse wrong options of a request, and keep cached prefixes of different options apart."""
    try:
        from vllm.v1.engine.input_processor import InputProcessor
    except ImportError:  # of a release that is refused where our backend is chosen
        return

    def process_inputs(stock: Any, processor: Any, *arguments: Any, **options: Any) -> Any:
        request = stock(processor, *arguments, **options)
        params, config = request.sampling_params, processor.vllm_config  # a copy of the caller's parameters
        if getattr(config.attention_config.backend, "name", None) != "CUSTOM" and os.environ.get(CPU_VARIABLE) != "1":
            return request
        given = getattr(params, "extra_args", None)
        requested = _options_of(given, config)
        if requested is not None:
            params.extra_args = requested.noted(given)
        request.cache_salt = prefix_key(request.cache_salt, requested)
        return request

    wrap_once(InputProcessor, "process_inputs", process_inputs)


def _options_of(given: Any, vllm_config: Any) -> RequestOptions | None:
    from vllm.exceptions import VLLMValidationError

    server = functools.partial(serving_options, vllm_config.additional_config, vllm_config.model_config.hf_config)
    try:
        requested = request_options(given, server, vllm_config.parallel_config.tensor_parallel_size)
    except ValueError as error:  # which servers answer with status 500
        raise VLLMValidationError(str(error)) from None
    if requested is not None and vllm_config.parallel_config.use_ubatching:
        raise VLLMValidationError("options of a request must be left out where vLLM overlaps batches (--enable-dbo)")
    return requested


def tell_requests(vllm_config: Any) -> None:
    """Make vLLM's model runner set `VLLMEngine.requested` before each step; ImportError if it has other functions than these."""
    if vllm_config.use_v2_model_runner:
        from vllm.v1.worker.gpu import model_runner

        name = "prepare_inputs"
    else:
        from vllm.v1.worker import gpu_model_runner as model_runner

        name = "_update_states"
    runner: Any = model_runner.GPUModelRunner
    faults = faults_in({"GPUModelRunner": runner}, {f"GPUModelRunner.{name}": ("scheduler_output",)})
    if faults:
        raise ImportError(f"flexmask needs another vLLM: {'; '.join(faults)}")

    def prepare(stock: Any, runner: Any, scheduler_output: Any, *arguments: Any, **options: Any) -> Any:
        batch = stock(runner, scheduler_output, *arguments, **options)
        engine = made_engine(runner.vllm_config)
        if engine is not None:
            requests = scheduler_output.scheduled_new_reqs
            new = {x.req_id: noted_options(getattr(x.sampling_params, "extra_args", None)) for x in requests}
            if name == "prepare_inputs":
                engine.choose(new, batch.req_ids, runner.req_states.req_id_to_index)
            else:
                engine.choose(new, runner.input_batch.req_ids, runner.requests)
        return batch

    wrap_once(runner, name, prepare)
