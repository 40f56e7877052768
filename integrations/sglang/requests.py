"""The options of single requests, in SGLang's ``custom_params``: read in its tokenizer process, and told to the scheduler's."""

from __future__ import annotations

from typing import Any

from flexmask.integrations.serving.options import PREFIX, RequestOptions, request_options
from flexmask.integrations.sglang.options import KERNELS, NAME, backends_of, resolved, serving_options

# what the tokenizer process has read, among the parameters that SGLang hands on; a request that sends this name is refused
_READ = f"{PREFIX}read"


def read_requests() -> None:
    """Make SGLang refuse wrong options of a request, and keep cached prefixes of different options apart."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    HookRegistry.register("sglang.srt.managers.tokenizer_manager.TokenizerManager._create_tokenized_object", _read)


def _read(tokenized: Any, manager: Any, *_: Any, **__: Any) -> None:
    """Called after a request is made; ValueError is its answer."""
    params = tokenized.sampling_params
    given = getattr(params, "custom_params", None) or {}
    if not any(name.startswith(PREFIX) for name in given) or backends_of(resolved(manager.server_args))[0] != NAME:
        return
    chosen = request_options(given, serving_options(KERNELS[0], manager.model_config.hf_config).settings)
    if chosen is not None:
        params.custom_params = {**given, _READ: list(chosen)}
        tokenized.extra_key = f"{tokenized.extra_key or ''}{chosen.salt}"


def tell_requests(chosen: dict[str, RequestOptions]) -> None:
    """Make SGLang fill `chosen`, by request id, with the options of the requests of each batch."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    def tell(made: Any, cls: Any, batch: Any, *_: Any, **__: Any) -> None:
        chosen.clear()
        for request in batch.reqs or ():
            read = (request.sampling_params.custom_params or {}).get(_READ)
            if read is not None:
                chosen[request.rid] = RequestOptions(*read)

    HookRegistry.register("sglang.srt.model_executor.forward_batch_info.ForwardBatch.init_new", tell)
    HookRegistry.apply_hooks()
