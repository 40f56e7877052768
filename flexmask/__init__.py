"""Sparse prefill for PyTorch FlexAttention: block masks computed from query and key."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flexmask.attention import plan as plan
    from flexmask.attention import sparse_attention as sparse_attention
    from flexmask.block_masks import METHODS as METHODS
    from flexmask.block_masks.flexprefill import flexprefill_mask as flexprefill_mask
    from flexmask.block_masks.hybrid import hybrid_mask as hybrid_mask
    from flexmask.stats import SelectionStats as SelectionStats
    from flexmask.varlen import sparse_attention_varlen as sparse_attention_varlen
    from flexmask.warming import warmup as warmup

__version__ = "0.1.0"
# loaded on first use: torch takes seconds to load, and the program writes its first line before. A mask comes from the package
# above its module: threads that import a package and a module of it at once wait for each other
_MODULES = {
    "METHODS": "block_masks",
    "SelectionStats": "stats",
    "flexprefill_mask": "block_masks",
    "hybrid_mask": "block_masks",
    "plan": "attention",
    "sparse_attention": "attention",
    "sparse_attention_varlen": "varlen",
    "sparse_prefill": "integrations.huggingface",
    "warmup": "warming",
}
# written out: type checkers read it
__all__ = [
    "METHODS", "SelectionStats", "flexprefill_mask", "hybrid_mask", "plan", "sparse_attention",
    "sparse_attention_varlen", "sparse_prefill", "warmup",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'flexmask' has no attribute {name!r}")
    return getattr(import_module(f"flexmask.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
