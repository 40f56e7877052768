"""The choice of FlexAttention's backend, and the limits of each."""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch

from flexmask._torch import (
    HAS_CPU_KERNEL,
    HAS_FLASH_BACKEND,
    dispatch_modes,
    in_transform,
    is_exporting,
    is_fake,
    is_traced,
    modes_that_disable_compile,
    records_operators,
    unsupported_tensor_kind,
)
from flexmask.base.checks import GRADIENT_DIMS
from flexmask.base.inputs import AttentionInputs
from flexmask.flex.flash import needs_no_mask_mod
from flexmask.flex.flash_case import FlashKind
from flexmask.flex.flash_check import NO_LSE_GRADIENT, Verdict, flash_verdict

BACKENDS = ("auto", "triton", "flash")
# major compute capability: where FLASH was run, and others with block-sparse kernels in flash-attn-4
_HOPPER = 9
_BLACKWELL = (10, 11)
_DENSE = "make the call dense by dense_below"


class Backend(NamedTuple):
    """A backend as a call uses it."""

    name: str  # "cpu", "triton" or "flash"
    lse_factor: float = 1.0  # of `Verdict`
    is_direct: bool = False  # called by `flash_attention`, else through FlexAttention
    has_lse: bool = True  # False where only the output was found right


def has_flash_package() -> bool:
    """True if flash-attn-4 is installed, for whatever torch. flash-attn 2 has a folder ``cute`` too, without block sparsity."""
    spec = importlib.util.find_spec("flash_attn")
    folders = () if spec is None else spec.submodule_search_locations or ()
    return any((Path(folder) / "cute" / "block_sparsity.py").is_file() for folder in folders)


_HAS_FLASH = HAS_FLASH_BACKEND and has_flash_package()


def flash_available() -> bool:
    """True if torch has the FLASH backend and the package is installed, on whatever GPU."""
    return _HAS_FLASH


def has_flash_kernels(device: torch.device) -> bool:
    """True on GPUs for which flash-attn-4 has block-sparse kernels, installed or not."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] in (_HOPPER, *_BLACKWELL)


def chosen_backend(
    backend: str,
    inputs: AttentionInputs,
    block_size: int,
    return_lse: bool = False,
    is_dense: bool = False,
    shares_lists: bool = False,
    verdict: Callable[[FlashKind, torch.device], Verdict | None] = flash_verdict,
    has_mask_mod: bool = True,
) -> Backend:
    """Resolve "auto", and refuse what a backend cannot do; FLASH runs only what `flash_verdict` finds right.

    `is_dense`: the call runs by SDPA, the backend is only checked. `shares_lists`: all heads have one list of blocks.
    `has_mask_mod`: the mask may hide tokens beyond causality, window and padding of `inputs`; if it does not, FLASH is called
    directly where that is right.
    """
    device = inputs.query.device
    if not is_dense:
        _check_sparse(inputs, return_lse)
    if backend == "triton":
        if device.type == "cpu":
            raise ValueError('backend="triton" needs a GPU; on a CPU use backend="auto"')
        return Backend("triton")
    if backend == "auto" and device.type == "cpu":
        return Backend("cpu")
    # fake tensors may be on a device that is not there
    has_gpu = device.type == "cuda" and torch.cuda.is_available()
    capability = torch.cuda.get_device_capability(device)[0] if has_gpu else 0
    needs_lse = return_lse or inputs.sinks is not None
    flex_kind = FlashKind.of(inputs, block_size, shares_lists)
    if backend == "flash":
        _check_flash_by_name(flex_kind, device, capability, needs_lse)
    elif capability != _HOPPER or is_dense or not flash_available() or not auto_takes_flash(flex_kind):
        return Backend("triton")
    kinds = [flex_kind]
    if not has_mask_mod and needs_no_mask_mod(inputs, block_size):
        kinds.insert(0, FlashKind.of(inputs, block_size, shares_lists, is_direct=True))
    for kind in kinds:
        outcome = verdict(kind, device)
        reason = "" if outcome is None else outcome.reason or (outcome.lse_reason if needs_lse else "")
        if outcome is not None and not reason:
            return Backend("flash", outcome.lse_factor, kind.is_direct, not outcome.lse_reason)
    if backend == "auto":
        return Backend("triton")
    if reason:
        raise ValueError(f'backend="flash" cannot run here: {reason}')
    if is_dense:
        return Backend("flash")
    raise ValueError(
        'backend="flash" has not been checked for calls of this kind, and no check can run here (in torch.compile, a CUDA-graph '
        "capture, a dispatch mode, a torch.func transform or an export): call flexmask.warmup first"
    )


def _check_flash_by_name(kind: FlashKind, device: torch.device, capability: int, needs_lse: bool) -> None:
    """Refuse what FLASH cannot do here, whatever its check would find."""
    reasons = []
    if device.type != "cuda":
        reasons.append(f"it needs a CUDA device (got {device.type})")
    elif capability == 12:
        reasons.append(
            'flash-attn-4 refuses block sparsity on compute capability 12 (4.0.0b36: "Block sparsity not supported on SM 12.0")'
        )
    elif capability != _HOPPER and capability not in _BLACKWELL:
        reasons.append(f"it needs a Hopper or Blackwell GPU of compute capability 9, 10 or 11 (got {capability})")
    if kind.dtype == torch.float32:
        reasons.append("it needs float16 or bfloat16 (got float32)")
    if needs_lse and kind.needs_grad:
        reasons.append(f"{NO_LSE_GRADIENT}, which return_lse and sinks need")
    if reasons:
        raise ValueError('backend="flash" cannot run here: ' + "; ".join(reasons))
    if not flash_available():
        got = f"torch {torch.__version__} {'with' if has_flash_package() else 'without'} it"
        raise ValueError(f'backend="flash" needs torch >= 2.10 and the package flash-attn-4; got {got}')
    if capability in _BLACKWELL and not is_traced():
        # Dao-AILab/flash-attention#2727, meta-pytorch/attention-gym#212: two query tiles of 128 share a program
        warnings.warn(
            f'backend="flash" is untested on compute capability {capability}: flash-attn-4 may need query blocks of 256 tokens '
            'there (flash-attention#2727), and a mask has 128; use backend="triton" to be safe',
            UserWarning,
            stacklevel=3,
        )


def auto_takes_flash(kind: FlashKind) -> bool:
    """True if "auto" takes FLASH for such calls, where its check finds them right; other calls must name it."""
    dims = kind.head_dim, kind.v_head_dim
    in_rows_of_16_bytes = dims[0] % 8 == 0 and dims[1] % 8 == 0
    is_fast = (dims[0] <= 192 and dims[1] <= 128) or dims == (256, 256)
    return kind.dtype != torch.float32 and kind.block_size == 128 and is_fast and in_rows_of_16_bytes and not kind.needs_grad


def _check_sparse(inputs: AttentionInputs, return_lse: bool) -> None:
    check_compiled_code_takes(inputs)
    if is_exporting():
        raise NotImplementedError(
            "torch.export cannot take sparse attention: an exported program may run flex_attention uncompiled, which ignores the "
            "block lists. Use torch.compile, or make the call dense by dense_below"
        )
    if inputs.query.device.type != "cpu":
        widest = max(x.shape[3] for x in (inputs.query, inputs.value) if x is not None)
        if inputs.needs_grad and widest > GRADIENT_DIMS:
            raise ValueError(
                f"query, key, value and sinks must not require gradients with a head_dim over {GRADIENT_DIMS} (got {widest}); "
                "call under torch.no_grad()"
            )
        return
    if inputs.needs_grad:
        raise ValueError("query, key, value and sinks must not require gradients on a CPU; call under torch.no_grad()")
    if return_lse:
        raise NotImplementedError("return_lse is not supported on CPUs: FlexAttention's CPU kernel has no log-sum-exp")
    if not HAS_CPU_KERNEL:
        raise NotImplementedError(
            f"FlexAttention runs on CPUs from torch 2.6 on; got torch {torch.__version__}. "
            "Use a newer torch or a GPU, or let the call run dense by dense_below"
        )


def check_compiled_code_takes(inputs: AttentionInputs) -> None:
    """Refuse tensors, and modes of this thread, with which the kernel would not run compiled."""
    if is_traced():
        return
    if in_transform():
        raise TypeError(f"sparse attention must be outside of the transforms of torch.func (grad, jvp, functionalize); {_DENSE}")
    for name in ("query", "key", "value", "attention_mask", "offset", "sinks"):
        tensor = getattr(inputs, name)
        kind = None if tensor is None else unsupported_tensor_kind(tensor)
        if kind is not None:
            raise TypeError(f"{name} must be a plain tensor for sparse attention; got {kind}; {_DENSE}")
    if is_fake(inputs.query):
        modes = [name for name in dispatch_modes() if name != "FakeTensorMode"]
        if modes or records_operators():
            others = " and ".join(modes) or "a graph that is recorded"
            raise RuntimeError(f"sparse attention supports FakeTensorMode only without other modes; got {others}; {_DENSE}")
    modes = modes_that_disable_compile()
    if modes:
        raise RuntimeError(
            f"torch.compile does not run under the mode {' and '.join(modes)}, and uncompiled flex_attention ignores the block "
            f"lists: leave the mode, or {_DENSE}"
        )
