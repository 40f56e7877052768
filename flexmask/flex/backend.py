"""The choice of FlexAttention's backend, and the limits of each."""

from __future__ import annotations

import importlib.util
import warnings
from pathlib import Path

import torch

from flexmask._torch import HAS_CPU_KERNEL, HAS_FLASH_BACKEND, is_exporting, is_traced
from flexmask.base.inputs import AttentionInputs

BACKENDS = ("auto", "triton", "flash")
_FLASH_BLOCK_SIZE = 128
_FLASH_HEAD_DIM = 128
# major compute capability: where FLASH was run, and others with block-sparse kernels in flash-attn-4
_HOPPER = 9
_BLACKWELL = (10, 11)


def flash_installed() -> bool:
    """True if flash-attn-4 is installed; flash-attn 2 has a folder ``cute`` too, without block sparsity."""
    spec = importlib.util.find_spec("flash_attn")
    folders = () if spec is None else spec.submodule_search_locations or ()
    return any((Path(folder) / "cute" / "block_sparsity.py").is_file() for folder in folders)


_HAS_FLASH = HAS_FLASH_BACKEND and flash_installed()


def flash_available() -> bool:
    """True if FlexAttention's FLASH backend can be used."""
    return _HAS_FLASH


def chosen_backend(
    backend: str, inputs: AttentionInputs, block_size: int, return_lse: bool = False, is_dense: bool = False
) -> str:
    """Resolve "auto" to "cpu", "triton" or "flash", and refuse what a backend cannot do.

    `is_dense`: the call runs by SDPA, the backend is only checked. Raises ValueError if a named backend cannot run here; warns
    where "flash" is untested.
    """
    query, value = inputs.query, inputs.value
    assert value is not None
    device = query.device.type
    capability = torch.cuda.get_device_capability(query.device)[0] if device == "cuda" else 0
    reasons = []
    if device != "cuda":
        reasons.append(f"it needs a CUDA device (got {device})")
    elif capability != _HOPPER and capability not in _BLACKWELL:
        reasons.append(f"it needs a Hopper or Blackwell GPU of compute capability 9, 10 or 11 (got {capability})")
    if query.dtype == torch.float32:
        reasons.append("it needs float16 or bfloat16 (got float32)")
    if block_size != _FLASH_BLOCK_SIZE:
        reasons.append(f"it needs block_size {_FLASH_BLOCK_SIZE} (got {block_size})")
    if max(query.shape[3], value.shape[3]) > _FLASH_HEAD_DIM or query.shape[3] != value.shape[3]:
        reasons.append(f"it needs equal head_dim <= {_FLASH_HEAD_DIM} (got {query.shape[3]} and {value.shape[3]} for value)")
    if inputs.softcap is not None:
        reasons.append("it is not tested with softcap")
    if return_lse or inputs.sinks is not None:
        reasons.append("its log-sum-exp was not that of the kept scores when measured (off by up to 7.6, torch 2.11)")
    if inputs.needs_grad:
        reasons.append("its gradient is not tested; use torch.no_grad()")
    if not is_dense:
        _check_sparse(device, inputs.needs_grad, return_lse)
    if backend == "flash":
        if reasons:
            raise ValueError('backend="flash" cannot run here: ' + "; ".join(reasons))
        if not flash_available():
            raise ValueError('backend="flash" needs torch >= 2.10 and the package flash-attn-4, which is not installed')
        if capability in _BLACKWELL and not is_traced():
            # Dao-AILab/flash-attention#2727, meta-pytorch/attention-gym#212: two query tiles of 128 share a program
            warnings.warn(
                f'backend="flash" is untested on compute capability {capability}, where flash-attn-4 is said to take query '
                'blocks of 256 tokens, and ours have 128; backend="triton" does not depend on that',
                UserWarning,
                stacklevel=2,
            )
        return "flash"
    if backend == "triton":
        if device == "cpu":
            raise ValueError('backend="triton" needs a GPU; on a CPU use backend="auto"')
        return "triton"
    if device == "cpu":
        return "cpu"
    return "flash" if capability == _HOPPER and not reasons and flash_available() else "triton"


def _check_sparse(device: str, needs_grad: bool, return_lse: bool) -> None:
    if is_exporting():
        raise NotImplementedError(
            "torch.export cannot take sparse attention: an exported program may run flex_attention uncompiled, which ignores the "
            "block lists. Use torch.compile, or make the call dense by dense_below"
        )
    if device != "cpu":
        return
    if needs_grad:
        raise ValueError("query, key, value and sinks must not require gradients on a CPU; call under torch.no_grad()")
    if return_lse:
        raise NotImplementedError("return_lse is not there on CPUs: FlexAttention's CPU kernel has no log-sum-exp")
    if not HAS_CPU_KERNEL:
        raise NotImplementedError(
            f"FlexAttention runs on CPUs from torch 2.6 on; got torch {torch.__version__}. "
            "Use a newer torch or a GPU, or let the call run dense by dense_below"
        )
