"""The public function `sparse_attention_varlen`: attention of packed sequences, each with its own selection."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, overload

import torch
from torch import Tensor

from flexmask._torch import is_fake, is_traced
from flexmask.attend import AttentionResult
from flexmask.attention import RECOMMENDED
from flexmask.base.checks import check_bool, check_int, check_plain, check_shape, is_integer, plain_number, plain_numbers
from flexmask.base.inputs import attention_inputs
from flexmask.call_options import DEFAULT_MASK_BYTES, checked_call_options
from flexmask.dense_policy import log_dense_once
from flexmask.flex.backend import chosen_backend
from flexmask.flex.packed import Segment, dense_attention_packed
from flexmask.method import method_of
from flexmask.plans import plan_call
from flexmask.stats import STATISTICS, SelectionStats, dense_stats

Bounds = Tensor | Sequence[int]  # flash-attn's cu_seqlens


# fmt: off
@overload
def sparse_attention_varlen(
    query: Tensor, key: Tensor, value: Tensor, cu_seqlens_q: Bounds, cu_seqlens_k: Bounds | None = ...,
    max_seqlen_q: int | None = ..., max_seqlen_k: int | None = ..., *, method: str | Callable[..., Any] = ...,
    block_size: int = ..., scale: float | None = ..., softcap: float | None = ..., window: int | None = ...,
    sinks: Tensor | None = ..., backend: str = ..., dense_below: int | None = ..., return_lse: Literal[False] = ...,
    return_stats: Literal[False] = ..., max_mask_bytes: int = ..., **options: Any,
) -> Tensor: ...
@overload
def sparse_attention_varlen(
    query: Tensor, key: Tensor, value: Tensor, cu_seqlens_q: Bounds, cu_seqlens_k: Bounds | None = ...,
    max_seqlen_q: int | None = ..., max_seqlen_k: int | None = ..., *, return_lse: Literal[True],
    return_stats: Literal[False] = ..., **keywords: Any,
) -> tuple[Tensor, Tensor]: ...
@overload
def sparse_attention_varlen(
    query: Tensor, key: Tensor, value: Tensor, cu_seqlens_q: Bounds, cu_seqlens_k: Bounds | None = ...,
    max_seqlen_q: int | None = ..., max_seqlen_k: int | None = ..., *, return_lse: Literal[False] = ...,
    return_stats: Literal[True], **keywords: Any,
) -> tuple[Tensor, tuple[SelectionStats, ...]]: ...
@overload
def sparse_attention_varlen(
    query: Tensor, key: Tensor, value: Tensor, cu_seqlens_q: Bounds, cu_seqlens_k: Bounds | None = ...,
    max_seqlen_q: int | None = ..., max_seqlen_k: int | None = ..., *, return_lse: Literal[True],
    return_stats: Literal[True], **keywords: Any,
) -> tuple[Tensor, Tensor, tuple[SelectionStats, ...]]: ...
@overload
def sparse_attention_varlen(
    query: Tensor, key: Tensor, value: Tensor, cu_seqlens_q: Bounds, cu_seqlens_k: Bounds | None = ...,
    max_seqlen_q: int | None = ..., max_seqlen_k: int | None = ..., *, method: str | Callable[..., Any] = ...,
    block_size: int = ..., scale: float | None = ..., softcap: float | None = ..., window: int | None = ...,
    sinks: Tensor | None = ..., backend: str = ..., dense_below: int | None = ..., return_lse: bool = ...,
    return_stats: bool = ..., max_mask_bytes: int = ..., **options: Any,
) -> Any: ...
# fmt: on
def sparse_attention_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Bounds,
    cu_seqlens_k: Bounds | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    *,
    method: str | Callable[..., Any] = RECOMMENDED,
    block_size: int = 128,
    scale: float | None = None,
    softcap: float | None = None,
    window: int | None = None,
    sinks: Tensor | None = None,
    backend: str = "auto",
    dense_below: int | None = None,
    return_lse: bool = False,
    return_stats: bool = False,
    max_mask_bytes: int = DEFAULT_MASK_BYTES,
    **options: Any,
) -> Any:
    """Causal attention of packed sequences to themselves: each gets the result of its own `sparse_attention`.

    Layout and names are those of flash-attn's ``flash_attn_varlen_func`` with ``causal=True``.

    Parameters
    ----------
    query
        (total_q, num_heads, head_dim), float32, float16 or bfloat16: the sequences' rows, one sequence after the other. Under
        ``torch.autocast`` query, key and value are cast to its dtype, as by SDPA.
    key
        (total_k, num_kv_heads, head_dim), query's dtype and device; num_kv_heads divides num_heads.
    value
        (total_k, num_kv_heads, v_head_dim), key's dtype and device.
    cu_seqlens_q, cu_seqlens_k
        (num_sequences + 1,) integers from 0 to total_q and total_k: sequence i has the rows
        ``cu_seqlens_q[i]:cu_seqlens_q[i + 1]`` and the keys ``cu_seqlens_k[i]:cu_seqlens_k[i + 1]``; its rows, perhaps none, are
        the last of its keys. A list or a tensor on the CPU; for one on a GPU the host waits for all work before it. Inside
        ``torch.compile`` only sequences of ints, in a captured CUDA graph no tensor on a GPU. Default of cu_seqlens_k:
        cu_seqlens_q.
    max_seqlen_q, max_seqlen_k
        Tokens: upper bounds of the lengths, as in flash-attn; checked, not needed. Default None.
    method, block_size, options
        As in `sparse_attention`, the same for all sequences.
    scale, softcap, window, sinks, backend, max_mask_bytes
        As in `sparse_attention`. Dense sequences share calls of Triton's kernel unless `backend` is ``"flash"``.
    dense_below, return_lse, return_stats
        As in `sparse_attention`, for each sequence.

    Returns
    -------
    Tensor
        (total_q, num_heads, v_head_dim) in query's dtype (autocast's, if on).
    Tensor
        (num_heads, total_q) float32, only with `return_lse`.
    tuple of SelectionStats
        One per sequence, tensors of (1, num_heads), only with `return_stats`. A sequence without rows counts as dense.

    Raises
    ------
    TypeError, ValueError
        As `sparse_attention`, and for bounds that do not begin at 0, decrease, do not end at the number of tokens, or give a
        sequence more rows than keys.
    NotImplementedError, RuntimeError
        As `sparse_attention`.

    Examples
    --------
    >>> import torch
    >>> query, key, value = torch.randn(700, 4, 32), torch.randn(700, 2, 32), torch.randn(700, 2, 32)
    >>> out, stats = sparse_attention_varlen(
    ...     query, key, value, [0, 600, 650, 700], block_size=64, min_budget=128, dense_below=512, return_stats=True
    ... )
    >>> out.shape
    torch.Size([700, 4, 32])
    >>> [of_sequence.dense for of_sequence in stats]
    [False, True, True]
    """
    checked_method = method_of(method, block_size, options)
    call_options = checked_call_options(backend, dense_below, max_mask_bytes)
    check_shape("query", query, "(total_q, num_heads, head_dim)")
    check_shape("key", key, "(total_k, num_kv_heads, head_dim)")
    check_shape("value", value, "(total_k, num_kv_heads, v_head_dim)")
    if value.shape[:2] != key.shape[:2]:
        raise ValueError(f"value must have key's total_k and num_kv_heads {tuple(key.shape[:2])}; got {tuple(value.shape[:2])}")
    cu_seqlens_k = cu_seqlens_q if cu_seqlens_k is None else cu_seqlens_k
    check_bool("return_lse", return_lse)
    check_bool("return_stats", return_stats)
    segments = segments_of(cu_seqlens_q, cu_seqlens_k, query.shape[0], key.shape[0])
    _check_longest("max_seqlen_q", max_seqlen_q, [segment.q_len for segment in segments])
    _check_longest("max_seqlen_k", max_seqlen_k, [segment.kv_len for segment in segments])
    pack = attention_inputs(
        *(x.transpose(0, 1).unsqueeze(0) for x in (query, key, value)), scale=scale, softcap=softcap, window=window, sinks=sinks
    )
    nonempty = [segment for segment in segments if segment.q_len > 0]
    segment_inputs = [segment.slice_inputs(pack) for segment in nonempty]
    fitted_methods = [checked_method.for_inputs(inputs) for inputs in segment_inputs]
    if backend != "auto":
        chosen_backend(backend, pack, block_size, return_lse, has_mask_mod=checked_method.is_user_method)

    policy, statistics = call_options.policy, STATISTICS if return_stats else ()
    reasons = [policy.size_reason(segment.q_len, segment.kv_len) for segment in nonempty]
    short = [segment for segment, reason in zip(nonempty, reasons, strict=True) if reason is not None]
    dense = iter(dense_attention_packed(pack, short, return_lse, backend))
    out, lse, stats = None, [], []
    for segment, inputs, fitted_method, reason in zip(nonempty, segment_inputs, fitted_methods, reasons, strict=True):
        if reason is not None:
            result = AttentionResult(*next(dense))
        else:
            # only for these: Dynamo never compiles a frame in which it first found nothing to compile
            plan = plan_call(inputs, fitted_method, call_options, return_lse)
            result, reason = plan.attend(inputs, statistics), plan.reason
        log_dense_once(reason, segment.q_len)
        if out is None:
            out = result.out.new_empty((query.shape[0], *result.out.shape[1::2]))
        out[segment.query] = result.out[0].transpose(0, 1)
        stats.append(result.stats)
        if result.lse is not None:
            lse.append(result.lse)
    extras: list[Any] = [torch.cat(lse, 2)[0]] if return_lse else []
    if return_stats:
        nonempty_stats = iter(stats)
        segment_stats = (next(nonempty_stats) if segment.q_len > 0 else None for segment in segments)
        extras.append(tuple(found or dense_stats(pack.query) for found in segment_stats))
    return (out, *extras) if extras else out


def segments_of(cu_seqlens_q: Any, cu_seqlens_k: Any, total_q: int, total_k: int) -> list[Segment]:
    """The sequences between the bounds; bounds on a GPU are copied to the host, both at once."""
    rows, keys = _on_host(cu_seqlens_q, cu_seqlens_k)
    _check_bounds("cu_seqlens_q", rows, "total_q", total_q)
    _check_bounds("cu_seqlens_k", keys, "total_k", total_k)
    if len(rows) != len(keys):
        raise ValueError(f"cu_seqlens_k must have as many entries as cu_seqlens_q, {len(rows)}; got {len(keys)}")
    segments = [Segment(slice(rows[i], rows[i + 1]), slice(keys[i], keys[i + 1])) for i in range(len(rows) - 1)]
    for index, segment in enumerate(segments):
        if segment.q_len > segment.kv_len:
            raise ValueError(
                f"cu_seqlens_q must give a sequence no more rows than cu_seqlens_k gives it keys; sequence {index} has "
                f"{segment.q_len} rows and {segment.kv_len} keys"
            )
    return segments


def _on_host(cu_seqlens_q: Any, cu_seqlens_k: Any) -> tuple[list[int], list[int]]:
    by_name = {"cu_seqlens_q": plain_numbers(cu_seqlens_q), "cu_seqlens_k": plain_numbers(cu_seqlens_k)}
    for name, bounds in by_name.items():
        if isinstance(bounds, Tensor):
            _check_bounds_tensor(name, bounds)
        elif not isinstance(bounds, (list, tuple)):
            raise TypeError(f"{name} must be a tensor or a sequence of ints; got {type(bounds).__name__}")
        else:
            for index, bound in enumerate(bounds):
                check_int(f"{name}[{index}]", bound)
    rows, keys = by_name["cu_seqlens_q"], by_name["cu_seqlens_k"]
    if all(isinstance(x, Tensor) and x.device.type != "cpu" for x in (rows, keys)) and rows.device == keys.device:
        both = torch.cat([rows.long(), keys.long()]).tolist()
        return both[: len(rows)], both[len(rows) :]
    rows, keys = (x.tolist() if isinstance(x, Tensor) else list(x) for x in (rows, keys))
    return rows, keys


def _check_bounds_tensor(name: str, bounds: Tensor) -> None:
    check_plain(name, bounds)
    if is_traced():
        raise TypeError(
            f"{name} must be a list or tuple of ints inside torch.compile, where no value of a tensor can be read; got a tensor"
        )
    if is_fake(bounds):
        raise ValueError(f"{name} must hold values; got a fake tensor (under FakeTensorMode give a list or tuple of ints)")
    if bounds.dim() != 1:
        raise ValueError(f"{name} must be (num_sequences + 1,); got shape {tuple(bounds.shape)}")
    if not is_integer(bounds):
        raise TypeError(f"{name} must be integer; got {bounds.dtype}")
    if bounds.is_cuda and torch.cuda.is_current_stream_capturing():
        raise ValueError(f"{name} must be on the host while a CUDA graph is captured; got a tensor on {bounds.device}")


def _check_bounds(name: str, bounds: list[int], total_name: str, total: int) -> None:
    if len(bounds) < 2:
        raise ValueError(f"{name} must hold at least two bounds, those of one sequence; got {len(bounds)}")
    if bounds[0] != 0:
        raise ValueError(f"{name} must begin at 0; got {bounds[0]}")
    for index in range(len(bounds) - 1):
        if bounds[index + 1] < bounds[index]:
            raise ValueError(f"{name} must not decrease; got {bounds[index]}, then {bounds[index + 1]} for sequence {index}")
    if bounds[-1] != total:
        raise ValueError(f"{name} must end at {total_name} = {total}; got {bounds[-1]}")


def _check_longest(name: str, max_seqlen: int | None, lengths: list[int]) -> None:
    if max_seqlen is None:
        return
    max_seqlen = plain_number(max_seqlen)
    check_int(name, max_seqlen)
    if max_seqlen < max(lengths):
        raise ValueError(f"{name} must be at least the longest sequence, {max(lengths)} tokens; got {max_seqlen}")
