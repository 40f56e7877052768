"""The public function `warmup`: compile before the first prompt arrives."""

from __future__ import annotations

import inspect
import time
from typing import Any

import torch

from flexmask.attention import RECOMMENDED, sparse_attention
from flexmask.base.checks import check_int, plain_number
from flexmask.flex.flash_check import check_for_compiled_callers
from flexmask.method import method_of

# tokens: a size that has changed is symbolic from the second call on; no multiples of a block
LENGTHS = (1100, 2300)
# blocks, on CUDA: they make medium and large maps (block_masks/flexprefill/map_top_p_kernels.py), which chunks halve
MANY_BLOCKS = (190, 370)


def warmup(
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    v_head_dim: int | None = None,
    batch: int = 1,
    chunked: bool = False,
    padded: bool = False,
    **options: Any,
) -> float:
    """Compile what `sparse_attention` needs for one shape of model, so later calls do not.

    Compiled code is kept for the process and works for all lengths. It is compiled again for

    * other numbers of heads, head_dim, dtype, batch size, device, memory layout, scale or softcap,
    * another method, or another value of an option that is not a float; on accelerators once for a second window,
    * calls with padding, an offset or a window after calls without: a server of chunks and whole prompts warms up both ways,
    * another state of the program: gradients (here off), inference mode, autocast, default dtype and device, number of threads,
      deterministic algorithms, TF32,
    * other sizes of groups of heads (`max_mask_bytes`), from about 190k tokens with 32 heads.

    It also runs FLASH's checks, which cannot run inside ``torch.compile`` (whose calls have checks of their own) or while a
    CUDA graph is captured.
    Inductor and Triton keep compiled code on disk. On CUDA the longest call has 47 thousand tokens in blocks of 128.

    Parameters
    ----------
    num_heads, num_kv_heads, head_dim
        Of the model's attention.
    dtype, device
        Of query, key and value.
    v_head_dim
        Default None: head_dim.
    batch
        Batch size, >= 1. Default 1.
    chunked
        Warm up for chunks (``q_len < kv_len``) instead of whole prompts. Default False.
    padded
        Warm up for calls with an attention mask. Default False.
    **options
        Other keywords of `sparse_attention` of later calls, such as method, gamma, window or backend; not attention_mask,
        q_offset and return_stats. `dense_below` is ignored.

    Returns
    -------
    float
        Seconds it took.

    Raises
    ------
    TypeError, ValueError
        As `sparse_attention`.

    Examples
    --------
    >>> import torch
    >>> seconds = warmup(4, 2, 32, dtype=torch.float32, device="cpu", gamma=0.9, block_size=64)
    >>> seconds > 0
    True
    """
    batch = plain_number(batch)
    check_int("batch", batch)
    v_head_dim = head_dim if v_head_dim is None else v_head_dim
    for name in ("attention_mask", "q_offset", "return_stats"):
        if name in options:
            raise TypeError(f"{name} is not an option of warmup; see its arguments chunked and padded")
    options["dense_below"] = 0
    block_size, taken = options.get("block_size", 128), inspect.signature(sparse_attention).parameters
    method_options = {name: value for name, value in options.items() if name not in taken}
    checked_method = method_of(options.get("method", RECOMMENDED), block_size, method_options)
    block = block_size if checked_method.needs_whole_blocks else 1
    lengths = [-(-length // block) * block for length in LENGTHS]
    if torch.device(device).type == "cuda":
        lengths += [blocks * block_size for blocks in MANY_BLOCKS]
    start = time.perf_counter()
    with torch.no_grad():
        for length in lengths:
            q_len = length // 2 if chunked else length
            query = torch.randn(batch, num_heads, q_len, head_dim, dtype=dtype, device=device)
            key = torch.randn(batch, num_kv_heads, length, head_dim, dtype=dtype, device=device)
            value = torch.randn(batch, num_kv_heads, length, v_head_dim, dtype=dtype, device=device)
            mask = torch.ones(batch, length, dtype=torch.bool, device=device) if padded else None
            chunk_options = {"prompt_len": length + 1} if chunked else {}
            sparse_attention(query, key, value, attention_mask=mask, **{**chunk_options, **options})
    if options.get("backend") != "triton":
        check_for_compiled_callers(dtype, head_dim, v_head_dim, has_window_or_offset=chunked)
    if query.is_cuda:
        torch.cuda.synchronize(query.device)
    return time.perf_counter() - start
