"""What the public functions refuse, from shapes, dtypes, devices and ranges only (nothing is read back from a device)."""

from __future__ import annotations

import torch
from torch import Tensor

from flexmask.config import FlexPrefillConfig, check_int, check_real

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_MOST_HEADS = 65535  # programs in the second dimension of a CUDA grid


def check_query_key(query: Tensor, key: Tensor) -> None:
    """Check the shapes, dtypes and devices of query and key against each other."""
    _check_four_dimensions("query", query, "(batch, num_heads, q_len, head_dim)")
    _check_four_dimensions("key", key, "(batch, num_kv_heads, kv_len, head_dim)")
    if query.dtype not in DTYPES:
        raise TypeError(f"query must be float32, float16 or bfloat16; got {query.dtype}")
    _check_like_query("key", key, query)
    batch, num_heads, q_len, head_dim = query.shape
    key_batch, num_kv_heads, kv_len, key_head_dim = key.shape
    if batch != key_batch:
        raise ValueError(f"key must have query's batch size {batch}; got {key_batch}")
    if head_dim != key_head_dim:
        raise ValueError(f"key must have query's head_dim {head_dim}; got {key_head_dim}")
    if not 16 <= head_dim <= 256:
        raise ValueError(f"query must have a head_dim from 16 to 256; got {head_dim}")
    if num_heads % num_kv_heads != 0:
        raise ValueError(f"query's num_heads must be a multiple of key's num_kv_heads {num_kv_heads}; got {num_heads}")
    if q_len > kv_len:
        raise ValueError(f"query's q_len must be at most key's kv_len {kv_len}; got {q_len}")
    if query.is_cuda and batch * num_heads > _MOST_HEADS:
        raise ValueError(f"query must have at most {_MOST_HEADS} heads in all batch rows on CUDA; got {batch} * {num_heads}")


def check_value(value: Tensor, key: Tensor) -> None:
    """Check value against key; their head_dim may differ."""
    _check_four_dimensions("value", value, "(batch, num_kv_heads, kv_len, v_head_dim)")
    _check_like_query("value", value, key)
    if value.shape[:3] != key.shape[:3]:
        raise ValueError(
            f"value must have key's batch, num_kv_heads and kv_len {tuple(key.shape[:3])}; got {tuple(value.shape[:3])}"
        )
    if not 16 <= value.shape[3] <= 256:
        raise ValueError(f"value must have a v_head_dim from 16 to 256; got {value.shape[3]}")


def check_sinks(sinks: Tensor | None, query: Tensor) -> None:
    """Check attention sinks: (num_heads,), floating, on query's device."""
    if sinks is None:
        return
    if not isinstance(sinks, Tensor):
        raise TypeError(f"sinks must be a tensor or None; got {type(sinks).__name__}")
    if tuple(sinks.shape) != (query.shape[1],):
        raise ValueError(f"sinks must be (num_heads,) = ({query.shape[1]},); got {tuple(sinks.shape)}")
    if not sinks.is_floating_point():
        raise TypeError(f"sinks must be floating; got {sinks.dtype}")
    if sinks.device != query.device:
        raise ValueError(f"sinks must be on query's device {query.device}; got {sinks.device}")


def check_scores(scale: float | None, softcap: float | None, window: int | None) -> None:
    """Check the options that change a score or its visibility."""
    for name, number in (("scale", scale), ("softcap", softcap)):
        if number is not None:
            check_real(name, number)
            if number <= 0:
                raise ValueError(f"{name} must be > 0; got {number}")
    if window is not None:
        check_int("window", window)
        if window < 1:
            raise ValueError(f"window must be >= 1 token (the row's own position counts); got {window}")


def check_attention_mask(attention_mask: Tensor | None, key: Tensor) -> None:
    """Check a padding mask: (batch, kv_len), bool or integer, on key's device."""
    if attention_mask is None:
        return
    if not isinstance(attention_mask, Tensor):
        raise TypeError(f"attention_mask must be a tensor or None; got {type(attention_mask).__name__}")
    expected = (key.shape[0], key.shape[2])
    if attention_mask.dim() != 2 or tuple(attention_mask.shape) != expected:
        raise ValueError(f"attention_mask must be (batch, kv_len) = {expected}; got {tuple(attention_mask.shape)}")
    if attention_mask.is_floating_point() or attention_mask.is_complex():
        raise TypeError(f"attention_mask must be bool or integer, 1 = token; got {attention_mask.dtype}")
    if attention_mask.device != key.device:
        raise ValueError(f"attention_mask must be on key's device {key.device}; got {attention_mask.device}")


def check_q_offset(q_offset: int | Tensor | None, query: Tensor, key: Tensor) -> None:
    """Check the position of the first query row; a tensor's values are not read."""
    if q_offset is None:
        return
    batch, q_len, kv_len = query.shape[0], query.shape[2], key.shape[2]
    if isinstance(q_offset, Tensor):
        if tuple(q_offset.shape) not in ((), (batch,)):
            raise ValueError(f"q_offset must be a 0-d or ({batch},) tensor; got shape {tuple(q_offset.shape)}")
        if q_offset.is_floating_point() or q_offset.is_complex() or q_offset.dtype == torch.bool:
            raise TypeError(f"q_offset must be an integer tensor; got {q_offset.dtype}")
        if q_offset.device != key.device:
            raise ValueError(f"q_offset must be on key's device {key.device}; got {q_offset.device}")
    else:
        check_int("q_offset", q_offset)
        if not 0 <= q_offset <= kv_len - q_len:
            raise ValueError(f"q_offset must be in [0, kv_len - q_len = {kv_len - q_len}]; got {q_offset}")


def check_published_selection(
    config: FlexPrefillConfig,
    query: Tensor,
    key: Tensor,
    softcap: float | None,
    window: int | None,
    attention_mask: Tensor | None,
    q_offset: int | Tensor | None,
) -> None:
    """Refuse what the authors' published code cannot do, when its block sets are asked for."""
    if config.selection != "reference":
        return
    for name, value in (
        ("softcap", softcap),
        ("window", window),
        ("attention_mask", attention_mask),
        ("q_offset", q_offset),
    ):
        if value is not None:
            raise ValueError(f'selection="reference" takes no {name}; use selection="coverage"')
    if config.pattern_queries != "last" or config.index_queries != "last" or config.query_aware != "flatten":
        raise ValueError(
            'selection="reference" needs pattern_queries="last", index_queries="last" and query_aware="flatten"; '
            f"got {config.pattern_queries!r}, {config.index_queries!r} and {config.query_aware!r}"
        )
    if config.share_kv_heads == "mean":
        raise ValueError(
            'selection="reference" keeps what the published code keeps of each head, which takes no share_kv_heads="mean"; '
            'use "union" or selection="coverage"'
        )
    q_len, kv_len = query.shape[2], key.shape[2]
    if q_len != kv_len or q_len % config.block_size != 0:
        raise ValueError(
            'selection="reference" needs a whole prompt of a multiple of block_size '
            f"({config.block_size}) tokens; got q_len {q_len} and kv_len {kv_len}"
        )


def _check_four_dimensions(name: str, tensor: Tensor, layout: str) -> None:
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name} must be a tensor {layout}; got {type(tensor).__name__}")
    if tensor.dim() != 4:
        raise ValueError(f"{name} must be {layout}; got shape {tuple(tensor.shape)}")
    if 0 in tensor.shape:
        raise ValueError(f"{name} must not be empty; got shape {tuple(tensor.shape)}")


def _check_like_query(name: str, tensor: Tensor, query: Tensor) -> None:
    if tensor.dtype != query.dtype:
        raise TypeError(f"{name} must have query's dtype {query.dtype}; got {tensor.dtype}")
    if tensor.device != query.device:
        raise ValueError(f"{name} must be on query's device {query.device}; got {tensor.device}")
