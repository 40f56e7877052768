"""Sparse prefill as an attention implementation of Hugging Face transformers. Importing this changes nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from flexmask.integrations.huggingface.context_manager import sparse_prefill
from flexmask.integrations.huggingface.model_config import configure
from flexmask.integrations.huggingface.registration import register
from flexmask.integrations.record import PrefillRun
from flexmask.settings import PrefillSettings

if TYPE_CHECKING:
    from flexmask.integrations.inspect import inspect_prefill

__all__ = ["PrefillRun", "PrefillSettings", "configure", "inspect_prefill", "register", "sparse_prefill"]


def __getattr__(name: str) -> Any:
    if name != "inspect_prefill":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    # its folder imports modules of this one
    from flexmask.integrations.inspect import inspect_prefill

    return inspect_prefill


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
