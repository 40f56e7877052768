"""flexprefill_mask: from query and key to a BlockMask."""

from __future__ import annotations

import functools

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from flexmask._torch import block_mask_from_lists
from flexmask.checks import (
    check_attention_mask,
    check_published_selection,
    check_q_offset,
    check_query_key,
    check_scores,
)
from flexmask.compiled_search import run_search
from flexmask.config import FlexPrefillConfig, config_from
from flexmask.mask_mods import kept_mask_mod, visible_mask_mod
from flexmask.memory import mask_bytes
from flexmask.search import SearchOptions, SearchResult
from flexmask.stats import FlexPrefillStats

MOST_BYTES = 16 * 2**30


def flexprefill_mask(
    query: Tensor,
    key: Tensor,
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
) -> BlockMask | tuple[BlockMask, FlexPrefillStats]:
    """FlexPrefill's block mask: which blocks of keys each block of queries attends to, by head and by input.

    The last block of queries decides, per head, whether block means predict its attention (Jensen-Shannon distance under
    `tau`); if so the head keeps the fewest blocks of its pooled map, else the fewest key blocks (verticals) and the fewest block
    diagonals (slashes), whose estimated attention reaches `gamma`. Every query block also keeps its first visible key block, its
    diagonal and the `min_budget` heaviest lines.

    Source: FlexPrefill (https://arxiv.org/abs/2502.20766), section 3, algorithms "Sparse Attention", "Sparse Pattern Search",
    "Vertical Slash Index Search" and "Query Aware Index Search".

    Differs from the paper: selection is by block (a slash counts for the two block diagonals it crosses), short and padded
    blocks weigh by the number of their keys, prompts may be padded, chunked, windowed or soft-capped, and heads that share keys
    may share a mask (`share_kv_heads`).

    Parameters
    ----------
    query
        (batch, num_heads, q_len, head_dim), float32, float16 or bfloat16, head_dim 16 to 256, any device.
    key
        (batch, num_kv_heads, kv_len, head_dim), the same dtype and device; num_kv_heads divides num_heads (GQA, MQA) and
        q_len <= kv_len. Lengths need not be multiples of the block.
    gamma, tau, block_size, min_budget, max_budget, selection, query_aware, pattern_queries, index_queries, share_kv_heads
        As in `FlexPrefillConfig`, which holds their units, ranges and defaults.
    scale
        Factor of the scores, > 0. Default None: 1 / sqrt(head_dim).
    softcap
        Soft cap of the scaled scores, > 0: ``softcap * tanh(score / softcap)``. Default None: none.
    window
        Tokens, >= 1: a row sees itself and the ``window - 1`` positions before it. Default None: all before it.
    attention_mask
        (batch, kv_len), bool or integer, nonzero = token; left, right or any padding. Padding takes no part in the estimate,
        and padded rows attend to nothing. Default None: all tokens.
    q_offset
        Position of query row 0, in [0, kv_len - q_len]: an int (checked) or an integer tensor, 0-d or (batch,), on the same
        device (clamped there). Keys at ``q_offset + q_len`` and after count as absent. Default None: kv_len - q_len, so that the
        last row stands at the last key.
    config
        A FlexPrefillConfig instead of its keywords.
    return_stats
        Also return `FlexPrefillStats`; costs a little time.

    Returns
    -------
    BlockMask
        Of shape (batch, num_heads, q_len, kv_len) with blocks of `block_size` both ways. Its mask_mod holds the block choice too,
        so that ``to_dense()``, ``sparsity()`` and flex_attention without compilation agree with the compiled kernel. It has no
        lists by key block, which only the backward pass needs: use `flexprefill_attention` for gradients. Memory: two int32 lists
        and a bool map of batch * num_heads * num_q_blocks * num_kv_blocks entries, 9 bytes an entry (0.3 GB for 32 heads at 128k
        tokens in blocks of 128); up to 14 bytes while it is made. torch 2.5's BlockMask knows
        whole blocks only: its shape and sparsity round the lengths up to them.
    FlexPrefillStats
        Only with `return_stats`.

    Raises
    ------
    TypeError, ValueError
        For wrong types, shapes, dtypes, devices or ranges, before anything is computed. The values of tensors are not read:
        there is no host synchronisation, and NaN or infinity spoil their own head only, or its group where that shares a mask.
        Also for a mask that would take more than 16 GiB while it is made (32 heads at a million tokens): `flexprefill_attention`
        goes through the heads in groups.

    Notes
    -----
    On accelerators it compiles itself on first use, once per head count, head_dim, dtype and set of options, on CUDA for each of
    three ranges of map size; on CPUs it runs as it is, since there a compilation takes a minute and gains little. Inside
    ``torch.compile(fullgraph=True)`` it is traced with the rest; on CUDA it is one operator there. Gradients do not flow through
    a mask.

    Examples
    --------
    >>> import torch
    >>> query, key = torch.randn(1, 4, 512, 64), torch.randn(1, 2, 512, 64)
    >>> mask = flexprefill_mask(query, key, gamma=0.9, block_size=64, min_budget=128)
    >>> mask.shape
    (1, 4, 512, 512)
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
    needed = query.shape[0] * query.shape[1] * mask_bytes(query.shape[2], key.shape[2], config)
    if needed > MOST_BYTES:
        raise ValueError(
            f"query and key need a mask of at most {MOST_BYTES / 2**30:.1f} GiB while it is made; got {needed / 2**30:.1f} GiB. "
            "Make it for fewer heads at a time, or call flexprefill_attention, which does"
        )
    offset = device_offset(q_offset, query, key)
    result = searched(query, key, config, scale, softcap, window, attention_mask, offset, return_stats)
    visible = visible_mask_mod(offset, None if attention_mask is None else attention_mask != 0, window, query.device)
    assert result.keep is not None
    # inside a surrounding compilation gamma may be symbolic, which no string can be made of
    traced = torch.compiler.is_compiling()
    name = "flexprefill" if traced else f"flexprefill(gamma={config.gamma}, tau={config.tau}, block_size={config.block_size})"
    block_mask = block_mask_from_lists(
        result.lists,
        kept_mask_mod(visible, result.keep, config.block_size, name),
        config.block_size,
        (query.shape[2], key.shape[2]),
    )
    if not return_stats:
        return block_mask
    assert result.stats is not None
    return block_mask, FlexPrefillStats(*result.stats)


def check_mask_arguments(
    query: Tensor,
    key: Tensor,
    config: FlexPrefillConfig,
    scale: float | None,
    softcap: float | None,
    window: int | None,
    attention_mask: Tensor | None,
    q_offset: int | Tensor | None,
) -> None:
    """Everything that `flexprefill_mask` refuses, but for the ranges that FlexPrefillConfig checks."""
    check_query_key(query, key)
    check_scores(scale, softcap, window)
    check_attention_mask(attention_mask, key)
    check_q_offset(q_offset, query, key)
    check_published_selection(config, query, key, softcap, window, attention_mask, q_offset)


def device_offset(q_offset: int | Tensor | None, query: Tensor, key: Tensor) -> Tensor | None:
    """`q_offset` as a clamped (batch,) int32 tensor, without a copy from the host; None where row 0 stands at position 0.

    A tensor, also where the value is known, so that another value is not another compilation; int32, as the indices are that
    kernels hand to a mask_mod (the FLASH backend refuses a mixture).
    """
    batch, q_len, kv_len = query.shape[0], query.shape[2], key.shape[2]
    if q_offset is None:
        if q_len == kv_len:
            return None
        q_offset = kv_len - q_len
    if isinstance(q_offset, Tensor):
        return q_offset.clamp(0, kv_len - q_len).to(torch.int32).expand(batch).clone()
    return torch.full((batch,), q_offset, dtype=torch.int32, device=query.device)


def searched(
    query: Tensor,
    key: Tensor,
    config: FlexPrefillConfig,
    scale: float | None,
    softcap: float | None,
    window: int | None,
    attention_mask: Tensor | None,
    offset: Tensor | None,
    with_stats: bool,
    with_keep: bool = True,
) -> SearchResult:
    """Run the search, outside of autograd; arguments are checked already."""
    options = SearchOptions(
        block_size=config.block_size,
        min_blocks=config.min_blocks,
        max_blocks=config.max_blocks,
        selection=config.selection,
        query_aware=config.query_aware,
        pattern_queries=config.pattern_queries,
        index_queries=config.index_queries,
        # a head that shares its keys with no other has nothing to join
        share_kv_heads=config.share_kv_heads if query.shape[1] != key.shape[1] else None,
        keep_all=config.gamma == 1,
        search_pattern=config.tau > 0,
        scale=query.shape[3] ** -0.5 if scale is None else float(scale),
        softcap=None if softcap is None else float(softcap),
        window=window,
        with_stats=with_stats,
        with_keep=with_keep or with_stats,
    )
    with torch.no_grad():
        gamma, tau = _scalars((config.gamma, config.tau), query.device)
        return run_search(query.detach(), key.detach(), gamma, tau, offset, attention_mask, options)


def _scalars(values: tuple[float, ...], device: torch.device) -> list[Tensor]:
    """`values` as 0-d float64 tensors; on a GPU those of earlier calls, since to make one is a launch."""
    if device.type != "cuda" or torch.compiler.is_compiling() or torch.cuda.is_current_stream_capturing():
        return [torch.full((), value, dtype=torch.float64, device=device) for value in values]
    return _kept_scalars(values, device, torch.cuda.current_stream(device).cuda_stream, torch.is_inference_mode_enabled())


@functools.lru_cache(maxsize=64)
def _kept_scalars(values: tuple[float, ...], device: torch.device, stream: int, inference: bool) -> list[Tensor]:
    # of one stream, so that none reads it before it is written, and of one mode, which compiled code tells apart
    return [torch.full((), value, dtype=torch.float64, device=device) for value in values]
