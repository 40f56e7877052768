"""vLLM's backends with sparse prefill, each made when it is first looked up: `builder` splits a step, `impl` runs it."""

from __future__ import annotations

import functools
import importlib
import logging
from typing import Any

import vllm

from flexmask.integrations.serving.versions import check_interfaces, refuse_older
from flexmask.integrations.vllm.registration import wrap_once
from flexmask.integrations.vllm.versions import interface_faults

_log = logging.getLogger("vllm.flexmask")
# by our name: the stock backend's module, class and kernel
_STOCK = {
    "SparseFlashAttention": ("flash_attn", "FlashAttentionBackend", "FLASH_ATTN"),
    "SparseTritonAttention": ("triton_attn", "TritonAttentionBackend", "TRITON_ATTN"),
    "SparseFlashLatentAttention": ("mla.flashattn_mla", "FlashAttnMLABackend", "FLASH_ATTN_MLA"),
    "SparseTritonLatentAttention": ("mla.triton_mla", "TritonMLABackend", "TRITON_MLA"),
}
_KINDS = {"FLASH_ATTN": "Flash", "TRITON_ATTN": "Triton"}  # the part of our name for each kernel


def __getattr__(name: str) -> Any:
    if name not in (*_STOCK, "Custom"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        refuse_older("vLLM", vllm.__version__)
        return _backend(_backend_name_for_model() if name == "Custom" else name)
    except ImportError as error:
        # vLLM drops the message of a backend's ImportError
        _log.error("%s", error)
        raise


def _backend_name_for_model() -> str:
    """The name in `_STOCK` for the model's kind of attention and the kernel in the options."""
    from vllm.config import get_current_vllm_config_or_none

    from flexmask.integrations.vllm.engine import engine_of

    config = get_current_vllm_config_or_none()
    if config is None:
        return "SparseFlashAttention"
    return f"Sparse{_KINDS[engine_of(config).options.kernel]}{'Latent' if config.model_config.use_mla else ''}Attention"


@functools.cache
def _backend(name: str) -> type:
    module, stock_name, kernel = _STOCK[name]
    stock: Any = getattr(importlib.import_module(f"vllm.v1.attention.backends.{module}"), stock_name)
    backend = sparse_backend(name, stock, kernel)  # first, because it refuses interfaces that flexmask does not know
    if stock.is_mla():
        measure_latent_layers()
    return backend


def sparse_backend(name: str, stock: Any, kernel: str) -> type:
    """A backend like `stock` whose long prompts run sparse."""
    check_interfaces("vLLM", vllm.__version__, interface_faults(stock))

    from flexmask.integrations.vllm.builder import SparseLatentBuilder, SparsePrefillBuilder
    from flexmask.integrations.vllm.impl import SparseLatentImpl, SparsePrefillImpl

    mixins = (SparseLatentImpl, SparseLatentBuilder) if stock.is_mla() else (SparsePrefillImpl, SparsePrefillBuilder)
    namespace = {"__module__": __name__}
    impl = type(f"{name}Impl", (mixins[0], stock.get_impl_cls()), {**namespace, "flexmask_kernel": kernel})
    builder: Any = type(f"{name}Builder", (mixins[1], stock.get_builder_cls()), namespace)
    builder.flexmask_own = builder

    overrides = {
        "get_name": staticmethod(lambda: "CUSTOM"),
        "get_impl_cls": staticmethod(lambda: impl),
        "get_builder_cls": staticmethod(lambda: builder),
        # the blocks that a row keeps depend on its chunk
        "supports_batch_invariance": classmethod(lambda cls: False),
        # sparse requests attend to the keys of the step itself, beside those in the cache
        "supports_kv_cache_update_bypass": False,
        # the builder splits a step by the lengths on the host
        "supports_device_cpu_query_lens_mismatch": classmethod(lambda cls: False),
    }
    return type(name, (stock,), {**namespace, "__qualname__": name, **overrides})


def measure_latent_layers() -> None:
    """Make vLLM's latent attention call `prepare` while memory is measured, when it skips its implementation."""
    from vllm.model_executor.layers.attention.mla_attention import MLAAttention

    def forward_impl(
        stock: Any, layer: Any, q: Any, k_c_normed: Any, k_pe: Any, kv_cache: Any, attn_metadata: Any, *rest: Any, **options: Any
    ) -> Any:
        if attn_metadata is None and hasattr(layer.impl, "flexmask"):
            layer.impl.flexmask.engine.prepare(q.device, in_profile=True)
        return stock(layer, q, k_c_normed, k_pe, kv_cache, attn_metadata, *rest, **options)

    wrap_once(MLAAttention, "forward_impl", forward_impl)
