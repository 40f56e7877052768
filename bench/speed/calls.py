"""Calls to time: dense kernels; masks, kernels and whole calls of a method at a density."""

from __future__ import annotations

import functools
import math
from typing import Any

import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from bench import ON_GPU
from bench.prompts.structured import Tensors
from bench.speed import random_blocks as random_blocks  # registers the method
from bench.speed.clock import Call
from flexmask import block_masks, sparse_attention
from flexmask.base.inputs import attention_inputs
from flexmask.call_options import DEFAULT_MASK_BYTES
from flexmask.flex.backend import flash_available
from flexmask.flex.block_mask import block_mask
from flexmask.flex.run import run_flex_attention
from flexmask.method import method_of
from flexmask.selection.prepare import prepare_selection
from flexmask.selection.select import select_blocks

BACKENDS = ("flash", "triton") if ON_GPU and flash_available() else ("triton",) if ON_GPU else ("cpu",)
# the option that decides how many blocks a method keeps
KNOBS = {"hybrid": "gamma", "flexprefill": "gamma", "published": "gamma", "random_blocks": "density"}
_CLOSE_ENOUGH = 0.003
_MAX_MASKS = 16


def dense_calls(tensors: Tensors) -> dict[str, Call]:
    """Dense causal attention by every kernel of this machine."""
    backends = {"cuDNN": SDPBackend.CUDNN_ATTENTION, "FlashAttention-2": SDPBackend.FLASH_ATTENTION} if ON_GPU else {}
    calls = {f"dense {name}": sdpa(tensors, backend) for name, backend in backends.items()} or {"dense SDPA": sdpa(tensors)}
    if ON_GPU and tensors[0].shape[3] > 256:  # PyTorch's only fused kernel for these
        groups = tensors[0].shape[1] // tensors[1].shape[1]
        repeated = (tensors[0], tensors[1].repeat_interleave(groups, 1), tensors[2].repeat_interleave(groups, 1))
        calls = {"dense memory-efficient": sdpa(repeated, SDPBackend.EFFICIENT_ATTENTION)}
    return calls | {f"dense flex {backend}": kernel(tensors, "causal", {}, backend) for backend in BACKENDS}


def sdpa(tensors: Tensors, backend: SDPBackend = SDPBackend.FLASH_ATTENTION) -> Call:
    """Dense causal attention by one of SDPA's kernels."""

    def run() -> Any:
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(*tensors, is_causal=True, enable_gqa=True)

    return run


def mask(tensors: Tensors, method: str, options: dict[str, Any]) -> Call:
    """The mask, by the public function."""
    return functools.partial(getattr(block_masks, f"{method}_mask"), *tensors[:2], **options)


def call(tensors: Tensors, method: str, options: dict[str, Any], backend: str = "auto") -> Call:
    """Mask and attention."""
    backend = "auto" if backend == "cpu" else backend
    return functools.partial(sparse_attention, *tensors, method=method, dense_below=0, backend=backend, **options)


def kernel(tensors: Tensors, method: str, options: dict[str, Any], backend: str) -> Call:
    """The attention kernel over given block lists."""
    options = dict(options)
    inputs = attention_inputs(*tensors).for_attention()
    chosen = method_of(method, options.pop("block_size", 128), options).for_inputs(inputs)
    selected = select_blocks(prepare_selection(chosen, inputs), inputs)
    made = block_mask(inputs, selected)
    return lambda: run_flex_attention(inputs, made, backend)[0]


def density(tensors: Tensors, method: str, options: dict[str, Any]) -> float:
    """Kept share of the causal blocks."""
    options = dict(options)
    inputs = attention_inputs(*tensors).for_attention()
    chosen = method_of(method, options.pop("block_size", 128), options).for_inputs(inputs)
    kept, of = 0.0, 0
    for group in chosen.groups(inputs, DEFAULT_MASK_BYTES):
        part = inputs.slice_heads(group)
        lists = select_blocks(prepare_selection(chosen.slice_heads(group.query_heads), part), part).lists
        kept += float((lists.kv_num_blocks + lists.full_kv_num_blocks).sum())
        blocks = lists.kv_num_blocks.shape[-1]
        of += lists.kv_num_blocks.numel() * (blocks + 1) // 2
    return kept / of


def at_density(tensors: Tensors, method: str, wanted: float, **options: Any) -> tuple[dict[str, Any], float]:
    """The options at which a method's density is nearest to `wanted`, and that density."""
    # a floor would keep more of structured prompts, whose evidence is diffuse, than texts do
    by_knob = {"min_coverage": 0.0} if method == "hybrid" else {}
    # density grows with the knob, most of all close to 1
    low, high = math.log(1 - 1e-3), math.log(1e-7)
    found: list[tuple[float, dict[str, Any], float]] = []
    while len(found) < _MAX_MASKS and all(off > _CLOSE_ENOUGH for off, _, _ in found):
        middle = (low + high) / 2
        tried = {**by_knob, **options, KNOBS[method]: 1 - math.exp(middle)}
        kept = density(tensors, method, tried)
        found.append((abs(kept - wanted), tried, kept))
        low, high = (middle, high) if kept < wanted else (low, middle)
    _, chosen, kept = min(found, key=lambda each: each[0])
    return chosen, kept
