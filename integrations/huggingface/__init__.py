"""Sparse prefill as an attention implementation of Hugging Face transformers. Importing this changes nothing."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flexmask.integrations.huggingface.model_config import configure as configure
    from flexmask.integrations.huggingface.prefill import sparse_prefill as sparse_prefill
    from flexmask.integrations.huggingface.registration import register as register
    from flexmask.integrations.inspect import inspect_prefill as inspect_prefill
    from flexmask.integrations.record import PrefillRun as PrefillRun
    from flexmask.settings import PrefillSettings as PrefillSettings

# imported on first use: these folders import modules of this one
_MODULES = {
    "PrefillRun": "integrations.record",
    "PrefillSettings": "settings",
    "configure": "integrations.huggingface.model_config",
    "inspect_prefill": "integrations.inspect",
    "register": "integrations.huggingface.registration",
    "sparse_prefill": "integrations.huggingface.prefill",
}
__all__ = list(_MODULES)


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"flexmask.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
