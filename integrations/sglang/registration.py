"""The entry point ``sglang.srt.plugins: flexmask``: registers the backend "flexmask", and reads the options of requests."""

from __future__ import annotations

# imports no flexmask: SGLang loads this module in each of its processes, whether or not our backend is chosen
import importlib
from typing import Any

NAME = "flexmask"  # the backend's in SGLang's arguments


def register() -> None:
    """Make ``--prefill-attention-backend flexmask`` choose sparse prefill, in SGLang of any release."""
    from sglang.srt import server_args
    from sglang.srt.layers.attention.attention_registry import register_attention_backend

    if NAME not in server_args.ATTENTION_BACKEND_CHOICES:
        server_args.add_attention_backend_choices([NAME])
    register_attention_backend(NAME)(_make_backend)
    encode_requests()


def _make_backend(runner: Any) -> Any:
    return importlib.import_module("flexmask.integrations.sglang.backend").make_backend(runner)


def encode_requests() -> None:
    """Make SGLang refuse wrong options of a request, and keep cached prefixes of different options apart."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    HookRegistry.register("sglang.srt.managers.tokenizer_manager.TokenizerManager._create_tokenized_object", _encode_request)


def _encode_request(tokenized: Any, manager: Any, *_: Any, **__: Any) -> None:
    """Encode the options of a new request; a ValueError becomes the answer to it."""
    params, key = tokenized.sampling_params, getattr(tokenized, "extra_key", None)
    custom_params, server_args = getattr(params, "custom_params", None), manager.server_args
    if not (custom_params or key) or server_args.prefill_attention_backend != NAME:
        return
    from flexmask.integrations.serving.options import prefix_key, request_options
    from flexmask.integrations.sglang.options import KERNELS, serving_options

    def read() -> Any:
        return serving_options(KERNELS[0], manager.model_config.hf_config)

    requested = request_options(custom_params, manager, read, server_args.tp_size)
    if requested is not None:
        if not hasattr(tokenized, "extra_key"):
            raise ValueError(
                "flexmask_gamma and flexmask_dense must be left out of requests that generate nothing: SGLang gives their cached "
                "prefixes no key to keep options apart"
            )
        params.custom_params = requested.encoded_in(custom_params)
    if hasattr(tokenized, "extra_key"):
        tokenized.extra_key = prefix_key(key, requested)
