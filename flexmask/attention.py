"""flexprefill_attention: mask and block-sparse attention in one call."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from flexmask._torch import HAS_CPU_KERNEL, block_mask_from_lists
from flexmask.backends import BACKENDS, chosen_backend, run_flex_attention
from flexmask.checks import check_sinks, check_value
from flexmask.config import FlexPrefillConfig, check_int, check_word, config_from
from flexmask.dense import dense_attention
from flexmask.flexprefill import check_mask_arguments, device_offset, searched
from flexmask.mask_mods import visible_mask_mod
from flexmask.memory import HeadGroup, head_groups, mask_bytes
from flexmask.stats import FlexPrefillStats, empty_stats

# tokens of kv_len: the shortest tried at which plain calls were faster than dense attention in all that was measured (README.md)
DENSE_BELOW = 16384
MAX_MASK_BYTES = 2**30
_STATISTICS = ("is_query_aware", "js_distance", "density", "num_vertical_blocks", "num_slash_blocks", "coverage")


def flexprefill_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    gamma: float = 0.95,
    tau: float = 0.1,
    *,
    block_size: int = 128,
    min_budget: int = 1024,
    max_budget: int | None = None,
    selection: str = "coverage",
    query_aware: str = "flatten",
    pattern_queries: str = "last",
    index_queries: str = "last",
    share_kv_heads: str | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    window: int | None = None,
    attention_mask: Tensor | None = None,
    q_offset: int | Tensor | None = None,
    config: FlexPrefillConfig | None = None,
    return_stats: bool = False,
    sinks: Tensor | None = None,
    backend: str = "auto",
    dense_below: int | None = None,
    return_lse: bool = False,
    max_mask_bytes: int = MAX_MASK_BYTES,
) -> Tensor | tuple[Tensor | FlexPrefillStats, ...]:
    """Causal attention over the blocks that FlexPrefill keeps.

    Makes the mask as `flexprefill_mask` does and runs FlexAttention's compiled block-sparse kernel on it.

    Source: FlexPrefill (https://arxiv.org/abs/2502.20766), section 3, algorithm "Sparse Attention".

    Parameters
    ----------
    query, key
        As in `flexprefill_mask`.
    value
        (batch, num_kv_heads, kv_len, v_head_dim), key's dtype and device; v_head_dim 16 to 256 may differ from head_dim.
    gamma, tau, block_size, min_budget, max_budget, selection, query_aware, pattern_queries, index_queries, share_kv_heads, config
        As in `FlexPrefillConfig`.
    scale, softcap, window, attention_mask, q_offset, return_stats
        As in `flexprefill_mask`.
    sinks
        (num_heads,) floating, on query's device: a logit per head that takes part in the softmax and brings no value (attention
        sinks, as in gpt-oss). The selection does not see them: `gamma` is a share of the attention to keys. Default None.
    backend
        ``"triton"``, ``"flash"`` (FlexAttention's FLASH backend: package flash-attn-4, Hopper or Blackwell, block_size 128,
        head_dim <= 128, half precision; no softcap, gradients or log-sum-exp) or ``"auto"`` (default): flash where it can run,
        else triton. On CPUs ``"auto"`` is the compiled C++ kernel.
    dense_below
        Tokens: with a kv_len below this, and for a single query row, dense attention runs instead. Default None: 16384,
        where it was 1.6 times as fast as dense attention on an H200 at a density of .55 and gamma .95 (FLASH backend); at 8,192
        plain calls are as slow as their host. 0 switches it off (but for a single row).
    return_lse
        Also return the log-sum-exp of every row (natural logarithm) over its keys, sinks not counted, (batch, num_heads, q_len)
        float32; -inf for a row that sees nothing. Not on CPUs, where FlexAttention has none.
    max_mask_bytes
        Bytes, > 0, that masks may take at one time: where all heads need more, groups of heads are masked and attended to one
        after the other. Default 2**30. A single head may exceed it, at a million tokens and blocks of 128 it takes 0.9 GB; so may
        the heads of one key head where they share a mask (`share_kv_heads`). It does not bound what gradients keep until the
        backward pass, nor ``selection="reference"``.

    Returns
    -------
    Tensor
        (batch, num_heads, q_len, v_head_dim) in query's dtype; zero for padded rows.
    Tensor
        The log-sum-exp, only with `return_lse`.
    FlexPrefillStats
        Only with `return_stats`; says whether the call ran dense.

    Raises
    ------
    TypeError, ValueError
        For wrong arguments; and on CPUs for inputs, sinks too, that require gradients while gradients are on, unless the call
        runs dense.
    NotImplementedError
        For `return_lse` on a CPU, and on a CPU with torch 2.5, unless the call runs dense.
    RuntimeError
        If torch.compile is switched off, or its recompilations have run out: the kernel never runs uncompiled.

    Examples
    --------
    >>> import torch
    >>> query, key, value = (torch.randn(1, 4, 512, 32) for _ in range(3))
    >>> out = flexprefill_attention(query, key, value, gamma=0.9, block_size=64, min_budget=128, dense_below=0)
    >>> out.shape
    torch.Size([1, 4, 512, 32])
    """
    config = config_from(
        config,
        gamma=gamma,
        tau=tau,
        block_size=block_size,
        min_budget=min_budget,
        max_budget=max_budget,
        selection=selection,
        query_aware=query_aware,
        pattern_queries=pattern_queries,
        index_queries=index_queries,
        share_kv_heads=share_kv_heads,
    )
    check_mask_arguments(query, key, config, scale, softcap, window, attention_mask, q_offset)
    check_value(value, key)
    check_sinks(sinks, query)
    check_word("backend", backend, BACKENDS)
    dense_below = _checked_dense_below(dense_below)
    check_int("max_mask_bytes", max_mask_bytes)
    if max_mask_bytes <= 0:
        raise ValueError(f"max_mask_bytes must be > 0 bytes; got {max_mask_bytes}")
    scale = query.shape[3] ** -0.5 if scale is None else float(scale)
    # a single row at the end sees every key: no offset has to be looked at
    offset = None if q_offset is None and query.shape[2] == 1 else device_offset(q_offset, query, key)

    if query.shape[2] == 1 or key.shape[2] < dense_below:
        if backend != "auto":  # what cannot run is refused at every length
            grad = _wants_gradients(query, key, value, sinks)
            chosen_backend(backend, query, value, config.block_size, softcap, grad, return_lse or sinks is not None)
        out, lse = dense_attention(query, key, value, scale, softcap, window, attention_mask, offset, sinks, return_lse)
        stats = empty_stats(query, dense=True) if return_stats else None
        return _results(out, lse, stats)

    valid = None if attention_mask is None else attention_mask != 0

    def masked(group: HeadGroup, q: Tensor, k: Tensor, grad: bool) -> tuple[BlockMask, FlexPrefillStats | None]:
        padding, token, first = (None if x is None else x[group.batch] for x in (attention_mask, valid, offset))
        found = searched(q, k, config, scale, softcap, window, padding, first, return_stats, with_keep=False)
        # the lists do the selection here, so that the mask_mod need only cut partial blocks
        visible = visible_mask_mod(first, token, window, q.device)
        lengths = (q.shape[2], k.shape[2])
        block_mask = block_mask_from_lists(found.lists, visible, config.block_size, lengths, with_gradients=grad)
        return block_mask, None if found.stats is None else FlexPrefillStats(*found.stats)

    one_head = mask_bytes(query.shape[2], key.shape[2], config)
    at_once = max_mask_bytes // one_head
    kernel = (scale, softcap, sinks, backend, return_lse)
    return _results(*attention_by_groups(masked, query, key, value, config, at_once, *kernel))


def attention_by_groups(
    masked: Callable[[HeadGroup, Tensor, Tensor, bool], tuple[BlockMask, FlexPrefillStats | None]],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    config: FlexPrefillConfig,
    at_once: int,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
    backend: str,
    return_lse: bool,
) -> tuple[Tensor, Tensor | None, FlexPrefillStats | None]:
    """Block-sparse attention, `at_once` heads at a time, under what `masked` makes for each group.

    `masked` takes a group, its query and key, and whether gradients will be asked for; it gives a mask, and statistics or None.
    """
    grad = _wants_gradients(query, key, value, sinks)
    kernel = chosen_backend(backend, query, value, config.block_size, softcap, grad, return_lse or sinks is not None)
    if kernel == "cpu" and grad:
        raise ValueError("query, key, value and sinks must not require gradients on a CPU; call under torch.no_grad()")
    if kernel == "cpu" and return_lse:
        raise NotImplementedError("return_lse is not there on CPUs: FlexAttention's CPU kernel has no log-sum-exp")
    if kernel == "cpu" and not HAS_CPU_KERNEL:
        raise NotImplementedError(
            f"FlexAttention runs on CPUs from torch 2.6 on; got torch {torch.__version__}. "
            "Use a newer torch or a GPU, or let the call run dense by dense_below"
        )
    if not grad:
        # FlexAttention's CPU kernel refuses leaves that require gradients even where gradients are off
        query, key, value = query.detach(), key.detach(), value.detach()
        sinks = None if sinks is None else sinks.detach()
    shared = config.share_kv_heads is not None
    groups = head_groups(query.shape[0], query.shape[1], key.shape[1], at_once, shared)

    def attend(group: HeadGroup) -> tuple[Tensor, Tensor | None, FlexPrefillStats | None]:
        q, k, v, sink = query, key, value, sinks
        if len(groups) > 1:
            q, k, v = query[group.batch, group.query], key[group.batch, group.key], value[group.batch, group.key]
            sink = None if sinks is None else sinks[group.query]
        block_mask, stats = masked(group, q, k, grad)
        out, lse = run_flex_attention(q, k, v, block_mask, scale, softcap, kernel, return_lse, sink)
        return out, lse, stats

    return attend(groups[0]) if len(groups) == 1 else _joined(query, value, groups, attend)


def _wants_gradients(*inputs: Tensor | None) -> bool:
    """Whether gradients are on and some input requires them."""
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs)


def _joined(
    query: Tensor,
    value: Tensor,
    groups: list[HeadGroup],
    attend: Callable[[HeadGroup], tuple[Tensor, Tensor | None, FlexPrefillStats | None]],
) -> tuple[Tensor, Tensor | None, FlexPrefillStats | None]:
    """Attention of all heads, group by group, each written to its place before the next is begun."""
    out = query.new_empty((*query.shape[:3], value.shape[3]))
    lse: Tensor | None = None
    stats: FlexPrefillStats | None = None
    for group in groups:
        part, part_lse, part_stats = attend(group)
        out[group.batch, group.query] = part
        if part_lse is not None:
            lse = part_lse.new_empty(query.shape[:3]) if lse is None else lse
            lse[group.batch, group.query] = part_lse
        if part_stats is not None:
            stats = empty_stats(query, dense=False) if stats is None else stats
            for name in _STATISTICS:
                getattr(stats, name)[group.batch, group.query] = getattr(part_stats, name)
    return out, lse, stats


def _checked_dense_below(dense_below: int | None) -> int:
    if dense_below is None:
        return DENSE_BELOW
    check_int("dense_below", dense_below)
    if dense_below < 0:
        raise ValueError(f"dense_below must be >= 0 tokens; got {dense_below}")
    return dense_below


def _results(out: Tensor, lse: Tensor | None, stats: FlexPrefillStats | None) -> Tensor | tuple[Tensor | FlexPrefillStats, ...]:
    extras = tuple(x for x in (lse, stats) if x is not None)
    return (out, *extras) if extras else out
