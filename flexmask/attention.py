"""flexprefill_attention: mask and block-sparse attention in one call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from flexmask.base.checks import check_int, check_shape, check_word
from flexmask.base.inputs import AttentionInputs, attention_inputs
from flexmask.config import UNSET, FlexPrefillConfig, config_from, takes_options
from flexmask.flex.backend import BACKENDS, chosen_backend
from flexmask.flex.block_mask import block_mask
from flexmask.flex.dense import dense_attention, runs_dense
from flexmask.flex.dense_heads import above_break_even, at_gamma_one, has_causal_kernel, query_heads, runs_of
from flexmask.flex.head_groups import head_bytes
from flexmask.flex.sparse import HeadPlan, attention_by_groups
from flexmask.plain.published import check_published
from flexmask.search import search
from flexmask.stats import FlexPrefillStats, empty_stats, stats_of

# tokens of kv_len: the shortest length at which plain calls beat dense attention on every input measured (docs/performance.md)
DENSE_BELOW = 16384
MAX_MASK_BYTES = 2**30


@takes_options
def flexprefill_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    gamma: float | Sequence[float] | Tensor = UNSET,
    tau: float = UNSET,
    *,
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
    **options: Any,
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
    gamma, tau, block_size, min_budget, max_budget, selection, query_aware, pattern_queries, index_queries, row_stride, config
        As in `FlexPrefillConfig`; `gamma` as in `flexprefill_mask`.
    scale, softcap, window, attention_mask, q_offset, return_stats
        As in `flexprefill_mask`.
    sinks
        (num_heads,) floating, on query's device: a logit per head that takes part in the softmax and brings no value (attention
        sinks, as in gpt-oss). The selection does not see them: `gamma` is a share of the attention to keys. Default None.
    backend
        ``"triton"``, ``"flash"`` (FlexAttention's FLASH backend: package flash-attn-4, a Hopper GPU, block_size 128, head_dim
        <= 128, half precision; no softcap, gradients or log-sum-exp; on Blackwell untested, with a warning) or ``"auto"``
        (default): flash on a Hopper GPU where it can run, else triton. On CPUs ``"auto"`` is the compiled C++ kernel.
    dense_below
        Tokens: with a kv_len below this, and for a single query row, dense attention runs instead. Default None: 16384,
        where it was 1.6 times as fast as dense attention on an H200 at a density of .55 and gamma .95 (FLASH backend); at 8,192
        plain calls are launch-bound. Above it, a whole prompt without padding, window, soft cap, sinks, gradients or log-sum-exp
        runs dense by SDPA in the heads where that is faster, key head by key head: at gamma 1 (not as a tensor, and with no
        `max_budget`), and on CPUs where the mask keeps more than .66 of the blocks (float16: .51, bfloat16: .43). The statistics
        say which. 0 switches all of this off, except for a single row.
    return_lse
        Also return the log-sum-exp of every row (natural logarithm) over its keys, sinks not counted, (batch, num_heads, q_len)
        float32; -inf for a row that sees nothing. Not on CPUs, where FlexAttention has none.
    max_mask_bytes
        Bytes, > 0, that masks may take at one time: where all heads need more, groups of heads are masked and attended to one
        after the other. Default 2**30. A single head may exceed it: at a million tokens and blocks of 128 it takes 0.9 GB on
        CUDA, 6 GB on a CPU. It does not bound what gradients keep until the backward pass.

    Returns
    -------
    Tensor
        (batch, num_heads, q_len, v_head_dim) in query's dtype, under autocast too; zero for padded rows.
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
    config = config_from(config, gamma, tau, options)
    check_shape("value", value, "(batch, num_kv_heads, kv_len, v_head_dim)")
    inputs = attention_inputs(
        query,
        key,
        value,
        scale=scale,
        softcap=softcap,
        window=window,
        attention_mask=attention_mask,
        q_offset=q_offset,
        sinks=sinks,
        gamma=gamma if isinstance(gamma, Tensor) else config.gamma,
    )
    check_published(config, inputs)
    check_word("backend", backend, BACKENDS)
    dense_below = check_dense_below(dense_below)
    check_max_mask_bytes(max_mask_bytes)

    limits = AttentionLimits(backend, dense_below, max_mask_bytes)
    out, lse, stats = attend(inputs, config, limits, return_lse, return_stats)
    extras = tuple(x for x in (lse, stats) if x is not None)
    return (out, *extras) if extras else out


class AttentionLimits(NamedTuple):
    """The options of `flexprefill_attention` that say how a call runs, checked."""

    backend: str
    dense_below: int
    max_mask_bytes: int


def attend(
    inputs: AttentionInputs, config: FlexPrefillConfig, limits: AttentionLimits, return_lse: bool, return_stats: bool
) -> tuple[Tensor, Tensor | None, FlexPrefillStats | None]:
    """`flexprefill_attention` of checked inputs: output, log-sum-exp and statistics, None where not asked for."""
    backend, dense_below, max_mask_bytes = limits
    query = inputs.query
    gains = dense_below > 0 and not return_lse and has_causal_kernel(inputs)
    if runs_dense(query.shape[2], inputs.key.shape[2], dense_below) or (gains and all(at_gamma_one(inputs, config))):
        if backend != "auto":  # one that cannot run is refused at every length
            chosen_backend(backend, inputs, config.block_size, return_lse)
        out, lse = dense_attention(inputs, return_lse)
        return out, lse, empty_stats(query, dense=True) if return_stats else None
    return attention_to_kept(inputs, config, backend, max_mask_bytes, dense_below > 0, return_lse, return_stats)


def attention_to_kept(
    inputs: AttentionInputs,
    config: FlexPrefillConfig,
    backend: str = "auto",
    max_mask_bytes: int = MAX_MASK_BYTES,
    dense_heads: bool = False,
    return_lse: bool = False,
    return_stats: bool = False,
    masks: list[BlockMask] | None = None,
) -> tuple[Tensor, Tensor | None, FlexPrefillStats | None]:
    """Attention over the blocks that FlexPrefill keeps: the sparse half of `flexprefill_attention`, of checked inputs.

    With `dense_heads`, dense attention serves the heads for which it is faster. To `masks`, if given, the mask of each group of
    heads is appended, its block choice in the mask_mod too: for pictures. The other arguments are the public function's own.
    """

    def make_mask(part: AttentionInputs) -> HeadPlan:
        # in a surrounding graph what empties lists and what reads them would be one more thing to order
        gains = dense_heads and not return_lse and not part.wants_gradients() and not torch.compiler.is_compiling()
        gains = gains and has_causal_kernel(part)
        num_kv_heads = part.key.shape[1]
        dense = at_gamma_one(part, config) if gains else [False] * num_kv_heads
        if all(dense) and not return_stats and masks is None:
            return HeadPlan(None)
        found = search(part, config, return_stats, with_keep=masks is not None)
        if masks is not None:
            masks.append(block_mask(part, found.lists, found.keep, config.block_size, "flexprefill"))
        # the lists do the selection here, so that the mask_mod need only cut partial blocks
        mask = block_mask(part, found.lists, None, config.block_size)
        if gains:
            dense = [any(reasons) for reasons in zip(dense, above_break_even(mask, part), strict=True)]
        runs = runs_of(dense)
        stats = None if found.stats is None else stats_of(found.stats, [query_heads(part, run) for run in runs])
        return HeadPlan(None if all(dense) else mask, stats, runs)

    inputs = inputs.with_gamma(config.gamma)
    at_once = max_mask_bytes // head_bytes(inputs, config)
    return attention_by_groups(inputs, make_mask, config.block_size, at_once, backend, return_lse)


def check_dense_below(dense_below: int | None) -> int:
    """`dense_below` with its default filled in, or an error."""
    if dense_below is None:
        return DENSE_BELOW
    check_int("dense_below", dense_below)
    if dense_below < 0:
        raise ValueError(f"dense_below must be >= 0 tokens; got {dense_below}")
    return dense_below


def check_max_mask_bytes(max_mask_bytes: int) -> None:
    """Raise unless `max_mask_bytes` is an int > 0."""
    check_int("max_mask_bytes", max_mask_bytes)
    if max_mask_bytes <= 0:
        raise ValueError(f"max_mask_bytes must be > 0 bytes; got {max_mask_bytes}")
