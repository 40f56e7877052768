"""The entry point ``sglang.srt.plugins: flexmask``: it registers the name of a backend, and reads the options of requests.

SGLang's tokenizer process reads the options of single requests, in ``custom_params``; `tell_requests` tells the scheduler's.
"""

from __future__ import annotations

from typing import Any

from flexmask.integrations.serving.options import has_options, request_options
from flexmask.integrations.sglang.options import KERNELS, NAME, backends_of, resolved, serving_options


def register() -> None:
    """Make ``--prefill-attention-backend flexmask`` choose sparse prefill, in each of SGLang's processes, of whatever release."""
    from sglang.srt import server_args
    from sglang.srt.layers.attention.attention_registry import register_attention_backend

    from flexmask.integrations.sglang.backend import make_backend

    if NAME not in server_args.ATTENTION_BACKEND_CHOICES:
        server_args.add_attention_backend_choices([NAME])
    register_attention_backend(NAME)(make_backend)
    read_requests()


def read_requests() -> None:
    """Make SGLang refuse wrong options of a request, and keep cached prefixes of different options apart."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    HookRegistry.register("sglang.srt.managers.tokenizer_manager.TokenizerManager._create_tokenized_object", _read)


def _read(tokenized: Any, manager: Any, *_: Any, **__: Any) -> None:
    """Called after a request is made; ValueError is its answer."""
    params = tokenized.sampling_params
    given = getattr(params, "custom_params", None) or {}
    if not has_options(given) or backends_of(resolved(manager.server_args))[0] != NAME:
        return
    requested = request_options(given, serving_options(KERNELS[0], manager.model_config.hf_config).settings)
    if requested is not None:
        params.custom_params = requested.noted(given)
        tokenized.extra_key = f"{tokenized.extra_key or ''}{requested.salt}"
