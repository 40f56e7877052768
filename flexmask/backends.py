"""How the compiled kernel is chosen and called: FlexAttention's backends, their limits and their tile sizes."""

from __future__ import annotations

import functools
import importlib.util
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from flexmask._torch import HAS_FLASH_BACKEND, captured
from flexmask.compilation import compiled
from flexmask.pooling import capped
from flexmask.sinks import with_sink_block, with_sinks

BACKENDS = ("auto", "triton", "flash")
_FLASH_BLOCK_SIZE = 128
_FLASH_HEAD_DIM = 128


def flash_installed() -> bool:
    """Whether the flash-attn-4 package is there, without importing it; flash-attn 2 has a folder ``cute`` too, of less."""
    spec = importlib.util.find_spec("flash_attn")
    folders = () if spec is None else spec.submodule_search_locations or ()
    return any((Path(folder) / "cute" / "block_sparsity.py").is_file() for folder in folders)


_HAS_FLASH = HAS_FLASH_BACKEND and flash_installed()


def flash_available() -> bool:
    """Whether FlexAttention's FLASH backend can be used: torch >= 2.10 and the flash-attn-4 package."""
    return _HAS_FLASH


def chosen_backend(
    backend: str, query: Tensor, value: Tensor, block_size: int, softcap: float | None, grad: bool, return_lse: bool
) -> str:
    """Resolve "auto" and refuse what a backend cannot do.

    Returns
    -------
    str
        "cpu", "triton" or "flash".

    Raises
    ------
    ValueError
        If "flash" or "triton" was asked for where it cannot run.
    """
    device = query.device.type
    reasons = []
    if device != "cuda":
        reasons.append(f"it needs a CUDA device (got {device})")
    elif torch.cuda.get_device_capability(query.device)[0] not in (9, 10):
        reasons.append("it needs a Hopper or Blackwell GPU")
    if query.dtype == torch.float32:
        reasons.append("it needs float16 or bfloat16 (got float32)")
    if block_size != _FLASH_BLOCK_SIZE:
        reasons.append(f"it needs block_size {_FLASH_BLOCK_SIZE} (got {block_size})")
    if max(query.shape[3], value.shape[3]) > _FLASH_HEAD_DIM or query.shape[3] != value.shape[3]:
        reasons.append(f"it needs equal head_dim <= {_FLASH_HEAD_DIM} (got {query.shape[3]} and {value.shape[3]} for value)")
    if softcap is not None:
        reasons.append("it is not tested with softcap")
    if return_lse:
        reasons.append("its log-sum-exp was not that of the kept scores when measured (off by up to 7.6, torch 2.11)")
    if grad:
        reasons.append("its gradient is not tested; use torch.no_grad()")
    if backend == "flash":
        if reasons:
            raise ValueError('backend="flash" cannot run here: ' + "; ".join(reasons))
        if not flash_available():
            raise ValueError('backend="flash" needs torch >= 2.10 and the package flash-attn-4, which is not installed')
        return "flash"
    if backend == "triton":
        if device == "cpu":
            raise ValueError('backend="triton" needs a GPU; on a CPU use backend="auto"')
        return "triton"
    if device == "cpu":
        return "cpu"
    return "flash" if not reasons and flash_available() else "triton"


def kernel_options(backend: str, block_size: int, head_dim: int, dtype: torch.dtype) -> dict[str, Any] | None:
    """Options of the kernel.

    Triton's tiles must divide the block: blocks that its defaults do not divide get the largest power of two up to 64. Wide rows
    (float32 with a head_dim over 64) get small tiles too, since queries, keys and values of all stages share 227 KiB.
    """
    if backend == "flash":
        return {"BACKEND": "FLASH"}
    row_bytes = head_dim * dtype.itemsize
    if backend == "cpu" or (block_size % 128 == 0 and row_bytes <= 512):
        return None
    tile = min(64 if row_bytes <= 256 else 32 if row_bytes <= 512 else 16, block_size & -block_size)
    return {"BLOCK_M": tile, "BLOCK_N": tile} | ({"num_stages": 2} if row_bytes > 256 else {})


def run_flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    block_mask: BlockMask,
    scale: float,
    softcap: float | None,
    backend: str,
    return_lse: bool = False,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Block-sparse attention by the compiled kernel, never by flex_attention's uncompiled path, which ignores block lists.

    With `sinks`, (num_heads,), by the log-sum-exp of the kernel; on CPUs, where there is none, by one more block of keys.
    """
    on_cpu = backend == "cpu"
    if sinks is not None and on_cpu:
        key, value, block_mask = with_sink_block(key, value, block_mask)
        sinks = captured(sinks.float())
    head_dim = query.shape[3]
    options = kernel_options(backend, block_mask.BLOCK_SIZE[0], head_dim, query.dtype)
    shapes = (
        query.device.type,
        query.device.index,
        query.dtype,
        query.shape[0],
        query.shape[1],
        key.shape[1],
        head_dim,
        value.shape[3],
        block_mask.BLOCK_SIZE,
    )
    needs_lse = return_lse or (sinks is not None and not on_cpu)
    fixed = (scale, softcap, backend, needs_lse, torch.is_grad_enabled(), block_mask.mask_mod.__name__)
    run = compiled(_flex_attention, *shapes, *fixed)
    # As text, which is always a constant. A float becomes symbolic once another variant had another one (dynamo remembers values
    # by their place in the source), and score_mods cannot capture a symbolic float. Traced from outside it may already be one.
    limit = softcap if softcap is None or torch.compiler.is_compiling() else repr(float(softcap))
    out, lse = run(query, key, value, block_mask, scale, limit, options, needs_lse, sinks if on_cpu else None)
    if sinks is not None and lse is not None:
        out = with_sinks(out, lse, sinks)
    return out, lse if return_lse else None


def _flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    block_mask: BlockMask,
    scale: float,
    limit: float | str | None,
    options: dict[str, Any] | None,
    return_lse: bool,
    sinks: Tensor | None,
) -> tuple[Tensor, Tensor | None]:
    if not torch.compiler.is_compiling():
        raise RuntimeError(
            "torch.compile is switched off (TORCH_COMPILE_DISABLE, a compiler stance or torch._dynamo.config.disable): "
            "flex_attention would run uncompiled and ignore the block lists. Switch it on, or call dense attention."
        )

    softcap = None if limit is None else float(limit) if isinstance(limit, str) else limit

    def cap(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return capped(score, softcap)

    def cap_and_sink(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        assert sinks is not None
        return torch.where(kv_idx == 0, sinks[h], capped(score, softcap))

    score_mod = cap_and_sink if sinks is not None else None if softcap is None else cap
    enable_gqa = query.shape[1] != key.shape[1]
    attend = functools.partial(flex_attention, query, key, value, score_mod, block_mask, scale, enable_gqa)
    if return_lse:
        out, lse = attend(return_lse=True, kernel_options=cast(Any, options))
        return out, lse
    return attend(kernel_options=cast(Any, options)), None
