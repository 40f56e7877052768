"""Sparse prefill for PyTorch FlexAttention: block masks computed from query and key."""

from typing import Any

from flexmask.attention import sparse_attention as sparse_attention
from flexmask.block_masks.flexprefill import flexprefill_mask as flexprefill_mask
from flexmask.block_masks.hybrid import hybrid_mask as hybrid_mask
from flexmask.selector import METHODS as METHODS
from flexmask.stats import SelectionStats as SelectionStats
from flexmask.varlen import sparse_attention_varlen as sparse_attention_varlen
from flexmask.warmup import warmup as warmup

__all__ = [
    "METHODS",
    "SelectionStats",
    "flexprefill_mask",
    "hybrid_mask",
    "sparse_attention",
    "sparse_attention_varlen",
    "sparse_prefill",
    "tune",
    "warmup",
]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    # the adapter imports transformers, which the rest does without
    if name in ("sparse_prefill", "tune"):
        from flexmask.integrations import huggingface

        return getattr(huggingface, name)
    raise AttributeError(f"module 'flexmask' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
