"""The methods that are compared: dense attention, FlexPrefill's call, mask and kernel, and the other masks of the gallery.

Each function takes query, key and value and returns a call without arguments, ready to be timed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import BlockMask

from bench import ON_GPU
from bench.prompts.structured import Tensors
from flexmask import flexprefill_attention, flexprefill_mask
from flexmask.base.inputs import attention_inputs
from flexmask.block_masks import MASKS, causal_mask
from flexmask.flex.backend import flash_available
from flexmask.flex.mask_mods import visible_mask_mod
from flexmask.flex.run import run_flex_attention

# the dense method that all ratios refer to, and the backends of flex_attention on this machine
DENSE = "dense cuDNN" if ON_GPU else "dense SDPA"
BACKENDS = ("flash", "triton") if ON_GPU and flash_available() else ("triton",) if ON_GPU else ("cpu",)
# flexprefill_mask has rows of its own; the other methods of the gallery are compared at equal loss, not here with their defaults
OTHER_MASKS = ("causal",)


def dense_sdpa(tensors: Tensors, backend: SDPBackend | None = None) -> Callable[[], Tensor]:
    """Dense causal attention through SDPA, by default with the backend of `DENSE`."""
    if backend is None:
        backend = SDPBackend.CUDNN_ATTENTION if ON_GPU else SDPBackend.FLASH_ATTENTION
    query, key, value = tensors

    def run() -> Tensor:
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)

    return run


def kernel(tensors: Tensors, block_mask: BlockMask, backend: str) -> Callable[[], Tensor]:
    """The attention kernel alone, over a mask's block lists.

    In compiled attention the lists do the selection, so the mask_mod only has to cut partial blocks: it becomes the one that
    `flexprefill_attention` uses.
    """
    query, key, value = tensors
    inputs = attention_inputs(query, key, value)
    block_mask.mask_mod = visible_mask_mod(inputs)
    return lambda: run_flex_attention(inputs, block_mask, backend)[0]


def dense_flex(tensors: Tensors, backend: str) -> Callable[[], Tensor]:
    """Dense causal attention through flex_attention; the mask is made beforehand."""
    return kernel(tensors, causal_mask(*tensors[:2]), backend)


def call(tensors: Tensors, backend: str, gamma: float, min_budget: int) -> Callable[[], Tensor]:
    """The whole call: mask and attention."""
    backend = "auto" if backend == "cpu" else backend
    options: dict[str, Any] = {"min_budget": min_budget, "backend": backend, "dense_below": 0}
    return lambda: cast(Tensor, flexprefill_attention(*tensors, gamma, **options))


def mask(tensors: Tensors, gamma: float, min_budget: int) -> Callable[[], BlockMask]:
    """flexprefill_mask alone."""
    return lambda: cast(BlockMask, flexprefill_mask(*tensors[:2], gamma, min_budget=min_budget))


def kernel_over_mask(tensors: Tensors, backend: str, gamma: float, min_budget: int) -> Callable[[], Tensor]:
    """The attention kernel alone, over FlexPrefill's mask, which is made beforehand."""
    return kernel(tensors, mask(tensors, gamma, min_budget)(), backend)


def other_mask(tensors: Tensors, name: str) -> Callable[[], BlockMask]:
    """A mask of `flexmask.block_masks` with its defaults."""
    return lambda: cast(BlockMask, MASKS[name](*tensors[:2]))


def other_call(tensors: Tensors, name: str, backend: str) -> Callable[[], Tensor]:
    """A mask of `flexmask.block_masks` with its defaults, then attention over it."""
    return lambda: kernel(tensors, other_mask(tensors, name)(), backend)()


def warm_up(method: Callable[[Tensors], Callable[[], Any]], tensors: Tensors) -> None:
    """Run a method once on a short piece of the prompt.

    torch compiles first for the one length it sees and, at a second length, for all lengths. This run uses up the first
    compilation, so that timings cover the second: the code that a program with prompts of many lengths runs.
    """
    short = min(1536, tensors[0].shape[2] // 2)
    method(cast(Tensors, tuple(x[:, :, :short].contiguous() for x in tensors)))()
