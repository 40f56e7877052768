"""The entry point ``vllm.general_plugins: flexmask``: registers the names in `backends`, and reads the options of requests."""

from __future__ import annotations

# imports no flexmask: vLLM loads this module in each of its processes, whether or not our backend is chosen
import functools
import logging
from collections.abc import Callable
from typing import Any

_BACKENDS = "flexmask.integrations.vllm.backends"
_log = logging.getLogger("vllm.flexmask")


def register() -> None:
    """Register sparse prefill as ``--attention-backend CUSTOM``; vLLM of any release calls this in each process."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    custom = AttentionBackendEnum.CUSTOM
    path = f"{_BACKENDS}.Custom"
    if custom.is_overridden() and custom.get_path() != path:
        taken = "flexmask: attention backend CUSTOM is already registered to %s, so flexmask is not registered"
        _log.warning(taken, custom.get_path())
    else:
        register_backend(custom, path)
    encode_requests()


def wrap_once(owner: Any, name: str, around: Callable[..., Any]) -> None:
    """Replace a function of a class by `around`, whose first argument is the stock function; once, as plug-ins may load again."""
    stock = getattr(owner, name)
    if hasattr(stock, "flexmask_stock"):
        return

    @functools.wraps(stock)
    def wrapper(*arguments: Any, **options: Any) -> Any:
        return around(stock, *arguments, **options)

    wrapper.flexmask_stock = stock  # type: ignore[attr-defined]
    setattr(owner, name, wrapper)


def encode_requests() -> None:
    """Make vLLM's front end refuse wrong options of a request, and keep cached prefixes of different options apart."""
    try:
        from vllm.v1.engine.input_processor import InputProcessor
    except ImportError:  # a release that is refused once our backend is chosen
        return

    def process_inputs(stock: Any, processor: Any, *arguments: Any, **options: Any) -> Any:
        request = stock(processor, *arguments, **options)
        params, config = request.sampling_params, processor.vllm_config  # a copy of the caller's parameters
        if not is_ours(config):
            return request
        from vllm.exceptions import VLLMValidationError

        from flexmask.integrations.serving.options import prefix_key, request_options
        from flexmask.integrations.vllm.options import serving_options

        def read() -> Any:
            return serving_options(config.additional_config, config.model_config.hf_config)

        extra_args = getattr(params, "extra_args", None)
        try:
            requested = request_options(extra_args, processor, read, config.parallel_config.tensor_parallel_size)
        # servers answer a plain ValueError with status 500
        except ValueError as error:
            raise VLLMValidationError(str(error)) from None
        if requested is not None:
            params.extra_args = requested.encoded_in(extra_args)
        request.cache_salt = prefix_key(request.cache_salt, requested)
        return request

    wrap_once(InputProcessor, "process_inputs", process_inputs)


def is_ours(vllm_config: Any) -> bool:
    """True for a server that runs our backend."""
    return getattr(vllm_config.attention_config.backend, "name", None) == "CUSTOM"
