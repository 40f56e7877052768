"""The entry point ``vllm.general_plugins: flexmask``: it registers the names in `backends`, and reads the options of requests.

vLLM loads it in each of its processes, so it imports nothing else of flexmask before our backend is chosen.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from flexmask.integrations.serving.options import RequestOptions, ServingOptions

_BACKENDS = "flexmask.integrations.vllm.backends"
_log = logging.getLogger("vllm.flexmask")


def register() -> None:
    """Register sparse prefill as ``--attention-backend CUSTOM``; vLLM calls this in each process, of whatever release."""
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
        from flexmask.integrations.serving.options import prefix_key

        extra_args = getattr(params, "extra_args", None)
        requested = _options_of(extra_args, processor)
        if requested is not None:
            params.extra_args = requested.encoded_in(extra_args)
        request.cache_salt = prefix_key(request.cache_salt, requested)
        return request

    wrap_once(InputProcessor, "process_inputs", process_inputs)


def is_ours(vllm_config: Any) -> bool:
    """True for a server that runs our backend."""
    return getattr(vllm_config.attention_config.backend, "name", None) == "CUSTOM"


def _options_of(extra_args: Any, processor: Any) -> RequestOptions | None:
    from vllm.exceptions import VLLMValidationError

    from flexmask.integrations.serving.options import request_options
    from flexmask.integrations.vllm.options import serving_options

    config = processor.vllm_config

    def read_server_options() -> ServingOptions:
        if not hasattr(processor, "flexmask_options"):  # as the engine has read them at its start
            processor.flexmask_options = serving_options(config.additional_config, config.model_config.hf_config)
        return cast("ServingOptions", processor.flexmask_options)

    try:
        return request_options(extra_args, read_server_options, config.parallel_config.tensor_parallel_size)
    # servers answer a plain ValueError with status 500
    except ValueError as error:
        raise VLLMValidationError(str(error)) from None
