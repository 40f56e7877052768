"""The public functions `sparse_attention` and `plan`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, overload

from torch import Tensor

from flexmask import block_masks as block_masks  # fills the table of methods
from flexmask.base.checks import check_bool, check_shape
from flexmask.base.inputs import attention_inputs
from flexmask.call_options import DEFAULT_MASK_BYTES, CallOptions, checked_call_options
from flexmask.dense_policy import log_dense_once
from flexmask.method import Method, method_of
from flexmask.plans import Plan, plan_call
from flexmask.stats import STATISTICS, SelectionStats

RECOMMENDED = "hybrid"


# fmt: off
@overload
def sparse_attention(
    query: Tensor, key: Tensor, value: Tensor, method: str | Callable[..., Any] = ..., *, block_size: int = ...,
    scale: float | None = ..., softcap: float | None = ..., window: int | None = ..., attention_mask: Tensor | None = ...,
    q_offset: int | Tensor | None = ..., prompt_len: int | None = ..., sinks: Tensor | None = ..., backend: str = ...,
    dense_below: int | None = ..., return_lse: Literal[False] = ..., return_stats: Literal[False] = ...,
    max_mask_bytes: int = ..., **options: Any,
) -> Tensor: ...
@overload
def sparse_attention(
    query: Tensor, key: Tensor, value: Tensor, method: str | Callable[..., Any] = ..., *, return_lse: Literal[True],
    return_stats: Literal[False] = ..., **keywords: Any,
) -> tuple[Tensor, Tensor]: ...
@overload
def sparse_attention(
    query: Tensor, key: Tensor, value: Tensor, method: str | Callable[..., Any] = ..., *, return_lse: Literal[False] = ...,
    return_stats: Literal[True], **keywords: Any,
) -> tuple[Tensor, SelectionStats]: ...
@overload
def sparse_attention(
    query: Tensor, key: Tensor, value: Tensor, method: str | Callable[..., Any] = ..., *, return_lse: Literal[True],
    return_stats: Literal[True], **keywords: Any,
) -> tuple[Tensor, Tensor, SelectionStats]: ...
@overload
def sparse_attention(
    query: Tensor, key: Tensor, value: Tensor, method: str | Callable[..., Any] = ..., *, block_size: int = ...,
    scale: float | None = ..., softcap: float | None = ..., window: int | None = ..., attention_mask: Tensor | None = ...,
    q_offset: int | Tensor | None = ..., prompt_len: int | None = ..., sinks: Tensor | None = ..., backend: str = ...,
    dense_below: int | None = ..., return_lse: bool = ..., return_stats: bool = ..., max_mask_bytes: int = ..., **options: Any,
) -> Any: ...
# fmt: on
def sparse_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    method: str | Callable[..., Any] = RECOMMENDED,
    *,
    block_size: int = 128,
    scale: float | None = None,
    softcap: float | None = None,
    window: int | None = None,
    attention_mask: Tensor | None = None,
    q_offset: int | Tensor | None = None,
    prompt_len: int | None = None,
    sinks: Tensor | None = None,
    backend: str = "auto",
    dense_below: int | None = None,
    return_lse: bool = False,
    return_stats: bool = False,
    max_mask_bytes: int = DEFAULT_MASK_BYTES,
    **options: Any,
) -> Any:
    """Causal attention over the blocks that a method keeps, the same compiled kernel for all methods.

    Parameters
    ----------
    query
        (batch, num_heads, q_len, head_dim), float32, float16 or bfloat16, head_dim 16 to 512 (256 with gradients), any device.
        Under ``torch.autocast`` query, key and value are cast to its dtype, as by SDPA.
    key
        (batch, num_kv_heads, kv_len, head_dim), the same dtype and device; num_kv_heads divides num_heads (GQA, MQA),
        q_len <= kv_len. Lengths need not be multiples of the block.
    value
        (batch, num_kv_heads, kv_len, v_head_dim), key's dtype and device; v_head_dim from 16 to 512, equal to head_dim or not.
    method
        A name in `flexmask.METHODS`; a mask function of `flexmask.block_masks`; or a function of query and key with the keywords
        block_size, window, attention_mask and q_offset (scale, softcap if it has them) that returns a BlockMask in blocks of
        `block_size`. A Python number that its mask_mod captures is compiled in, so another value may recompile; a value in a
        tensor does not. Default ``"hybrid"``, which we recommend; ``"flexprefill"`` is the paper's.
    block_size
        Tokens per block of queries and of keys: a multiple of 16 from 16 to 256, default 128 (FlexAttention's). Values that 64
        does not divide run slowly on GPUs, whose tiles must divide the block.
    scale
        Factor of the scores, > 0. Default None: 1 / sqrt(head_dim).
    softcap
        Soft cap of the scaled scores, > 0: ``softcap * tanh(score / softcap)``. Default None.
    window
        Tokens, >= 1: a row sees itself and the ``window - 1`` positions before it. Default None: all before it.
    attention_mask
        (batch, kv_len), bool or integer on key's device, nonzero = token. No token attends to padding; padded rows attend to
        nothing. Padding on the right (without `prompt_len`), or of a multiple of `block_size` on the left, leaves the selection
        unchanged; other padding shifts the blocks. Default None.
    q_offset
        Position of query row 0, in [0, kv_len - q_len]: an int (checked) or an integer tensor, 0-d or (batch,), on the same
        device (clamped there). Keys from ``q_offset + q_len`` on are absent. Default None: kv_len - q_len.
    prompt_len
        Tokens, >= 1, of the whole prompt if this call is a chunk of it, padding included: thresholds of ``"hybrid"`` follow it.
        Blocks of padding after the chunk count too, so rows padded on the right keep more. No other method reads it. Default
        None: the prompt ends with the call's last row.
    sinks
        (num_heads,) floating, on query's device: one more logit per head in the softmax's denominator, without a value (as in
        gpt-oss); the selection ignores it. Default None.
    backend
        ``"triton"``, ``"flash"`` (FlexAttention's FLASH backend: package flash-attn-4, a Hopper GPU, half precision; untested on
        Blackwell, with a warning) or ``"auto"`` (default): flash on a Hopper GPU for block_size 128, head dims of multiples of 8
        up to 192, of value up to 128, or both 256, and no gradients, else triton; on CPUs the compiled C++ kernel. Flash runs
        only calls that a numeric check found right, which the first call of a kind on a device runs (docs/limits.md);
        ``backend="flash"`` raises for others.
    dense_below
        Tokens: calls with a smaller kv_len, or a single query row, run dense. Default None: 16384, the shortest length at which
        plain calls of flexprefill (gamma 0.95) beat dense attention on every input measured (docs/performance.md). Single KV
        heads also run dense, in longer whole prompts without padding, window, soft cap, sinks, gradients or log-sum-exp: those
        whose query heads keep every block, on CPUs more than 66% of the blocks (float16: 51%, bfloat16: 43%). 0 runs every call
        and head sparse, except a single row.
    return_lse
        Also return each row's log-sum-exp (natural logarithm) over its keys without sinks, (batch, num_heads, q_len) float32;
        -inf for a row that sees nothing. Not on CPUs.
    return_stats
        Also return `SelectionStats`, which takes extra time.
    max_mask_bytes
        Bytes, > 0, of masks at one time: larger calls run groups of heads one after the other. Default 2**30. A single head may
        exceed it (at a million tokens 0.9 GB on CUDA, 6 GB on a CPU), and so may gradients.
    options
        The method's own, as in its mask function (`flexmask.hybrid_mask`, `flexmask.flexprefill_mask`, ...).

    Returns
    -------
    Tensor
        (batch, num_heads, q_len, v_head_dim) in query's dtype (autocast's, if on), in any memory layout; zero for padded rows.
        Under FakeTensorMode a fake one.
    Tensor
        The log-sum-exp, only with `return_lse`.
    SelectionStats
        Only with `return_stats`.

    Raises
    ------
    TypeError, ValueError
        For wrong arguments, an unknown method or option, a function's result that is no BlockMask of this call; on CPUs for
        inputs that require gradients while gradients are on, unless the call runs dense.
    NotImplementedError
        For `return_lse` on a CPU, a CPU with torch 2.5, and ``torch.export``, unless the call runs dense.
    RuntimeError
        If torch.compile is switched off, out of recompilations, or stopped by a dispatch mode such as FlopCounterMode: the kernel
        never runs uncompiled.

    Examples
    --------
    >>> import torch
    >>> query, key, value = (torch.randn(1, 4, 512, 32) for _ in range(3))
    >>> out = sparse_attention(query, key, value, gamma=0.9, block_size=64, min_budget=128, dense_below=0)
    >>> out.shape
    torch.Size([1, 4, 512, 32])
    """
    check_bool("return_stats", return_stats)
    call_plan = _planned(
        query, key, value, method_of(method, block_size, options), checked_call_options(backend, dense_below, max_mask_bytes),
        return_lse, scale=scale, softcap=softcap, window=window, attention_mask=attention_mask, q_offset=q_offset,
        prompt_len=prompt_len, sinks=sinks,
    )  # fmt: skip
    return call_plan.attend(call_plan.inputs, STATISTICS if return_stats else ()).as_returned()


def plan(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    method: str | Callable[..., Any] = RECOMMENDED,
    *,
    block_size: int = 128,
    scale: float | None = None,
    softcap: float | None = None,
    window: int | None = None,
    attention_mask: Tensor | None = None,
    q_offset: int | Tensor | None = None,
    prompt_len: int | None = None,
    sinks: Tensor | None = None,
    backend: str = "auto",
    dense_below: int | None = None,
    return_lse: bool = False,
    max_mask_bytes: int = DEFAULT_MASK_BYTES,
    **options: Any,
) -> Plan:
    """Check and plan once what the layers of a forward pass have in common; ``plan.run(query, key, value)`` runs each.

    ``plan(query, key, value, ...).run(query, key, value)`` returns what ``sparse_attention(query, key, value, ...)`` does. The
    plan holds the checked options and geometry, the backend, what runs dense and why, and copies on the device of padding,
    offsets, edges of blocks and options per head, but neither query, key, value nor sinks. Make one for each set of shapes,
    padding and offsets. A CUDA graph that captured its runs is valid only while the plan lives. To run it on another stream,
    first make that stream wait for the one that created the plan.

    Parameters
    ----------
    query, key, value, sinks
        As in `sparse_attention`, of any layer: the plan takes their shapes, dtypes, device and need of gradients.
    method, block_size, scale, softcap, window, attention_mask, q_offset, prompt_len
        As in `sparse_attention`.
    backend, dense_below, return_lse, max_mask_bytes, options
        As in `sparse_attention`.

    Returns
    -------
    Plan
        It has the method ``run``, and the attribute ``reason``: why calls run dense, or None.

    Raises
    ------
    TypeError, ValueError, NotImplementedError, RuntimeError
        As `sparse_attention`.

    Examples
    --------
    >>> import torch
    >>> layers = [[torch.randn(1, 4, 512, 32) for _ in range(3)] for _ in range(2)]
    >>> call_plan = plan(*layers[0], gamma=0.9, block_size=64, min_budget=128, dense_below=0)
    >>> [call_plan.run(query, key, value).shape[2] for query, key, value in layers]
    [512, 512]
    """
    return _planned(
        query, key, value, method_of(method, block_size, options), checked_call_options(backend, dense_below, max_mask_bytes),
        return_lse, scale=scale, softcap=softcap, window=window, attention_mask=attention_mask, q_offset=q_offset,
        prompt_len=prompt_len, sinks=sinks,
    ).without_tensors()  # fmt: skip


def _planned(
    query: Tensor, key: Tensor, value: Tensor, method: Method, call_options: CallOptions, return_lse: bool, **geometry: Any
) -> Plan:
    check_bool("return_lse", return_lse)
    check_shape("value", value, "(batch, num_kv_heads, kv_len, v_head_dim)")
    inputs = attention_inputs(query, key, value, **geometry)
    call_plan = plan_call(inputs, method.for_inputs(inputs), call_options, return_lse)
    log_dense_once(call_plan.reason, inputs.query.shape[2])
    return call_plan
