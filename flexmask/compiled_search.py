"""The search as it is run: compiled on accelerators, as it is on CPUs, and as one operator inside other compilations on CUDA."""

from __future__ import annotations

import contextlib

import torch
from torch import Tensor

from flexmask._torch import HAS_TRITON, with_dynamic, without_tf32
from flexmask.compilation import compiled
from flexmask.emit import BlockLists
from flexmask.search import SearchOptions, SearchResult, SearchStats, search
from flexmask.visibility import num_blocks

if HAS_TRITON:
    from flexmask.fused_search import fused_search


def run_search(
    query: Tensor,
    key: Tensor,
    gamma: Tensor,
    tau: Tensor,
    offset: Tensor | None,
    attention_mask: Tensor | None,
    options: SearchOptions,
) -> SearchResult:
    """`search`, or on CUDA `fused_search`; the arguments are theirs."""
    fused = HAS_TRITON and query.is_cuda and options.selection == "coverage"
    if torch.compiler.is_compiling():
        if fused:
            return _as_one_operator(query, key, gamma, tau, offset, attention_mask, options)
        return search(query, key, gamma, tau, offset, attention_mask, options)
    if query.device.type == "cpu":
        # not compiled on CPUs: it takes a minute there and gains little, the heavy operations being matrix products
        return search(query, key, gamma, tau, offset, attention_mask, options)
    batch, num_heads, q_len, head_dim = query.shape
    shape = (batch == 1, num_heads, key.shape[1], q_len == key.shape[2], head_dim, offset is None, attention_mask is None)
    where = (query.device.type, query.device.index, query.dtype)
    run = compiled(fused_search if fused else search, options, *where, *shape, launched=fused)
    query, key = with_dynamic(query, 2), with_dynamic(key, 2)
    if attention_mask is not None:
        attention_mask = with_dynamic(attention_mask, 1)
    with contextlib.nullcontext() if fused else without_tf32():  # our kernels have no such products
        return run(query, key, gamma, tau, offset, attention_mask, options)


def _as_one_operator(
    query: Tensor,
    key: Tensor,
    gamma: Tensor,
    tau: Tensor,
    offset: Tensor | None,
    attention_mask: Tensor | None,
    options: SearchOptions,
) -> SearchResult:
    """`run_search` as an operator that a surrounding compilation does not look into.

    Traced into, our kernels and flex_attention's in one graph gave wrong results (torch 2.11, which as far as we can tell does
    not order what flex_attention's template reads after the kernels that write it).
    """
    found = search_operator(query, key, gamma, tau, offset, attention_mask, *_fields(options))
    keep = found[4] if options.with_keep else None
    return SearchResult(BlockLists(*found[:4]), keep, SearchStats(*found[5:]) if options.with_stats else None)


def _fields(options: SearchOptions) -> tuple[int | float | bool | str | None, ...]:
    """The options, in the order in which the operator takes them, which is SearchOptions' own."""
    return (
        options.block_size,
        options.min_blocks,
        options.max_blocks,
        options.selection,
        options.query_aware,
        options.pattern_queries,
        options.index_queries,
        options.share_kv_heads,
        options.keep_all,
        options.search_pattern,
        options.scale,
        options.softcap,
        options.window,
        options.with_stats,
        options.with_keep,
    )


# written out, because older releases of torch cannot read it off the annotations
_SCHEMA = (
    "(Tensor query, Tensor key, Tensor gamma, Tensor tau, Tensor? offset, Tensor? attention_mask, int block_size, "
    "int min_blocks, int? max_blocks, str selection, str query_aware, str pattern_queries, str index_queries, "
    "str? share_kv_heads, bool keep_all, bool search_pattern, float scale, float? softcap, int? window, bool with_stats, "
    "bool with_keep) -> Tensor[]"
)


@torch.library.custom_op("flexmask::search", mutates_args=(), schema=_SCHEMA)
def search_operator(
    query: Tensor,
    key: Tensor,
    gamma: Tensor,
    tau: Tensor,
    offset: Tensor | None,
    attention_mask: Tensor | None,
    block_size: int,
    min_blocks: int,
    max_blocks: int | None,
    selection: str,
    query_aware: str,
    pattern_queries: str,
    index_queries: str,
    share_kv_heads: str | None,
    keep_all: bool,
    search_pattern: bool,
    scale: float,
    softcap: float | None,
    window: int | None,
    with_stats: bool,
    with_keep: bool,
) -> list[Tensor]:
    """The four tensors of the lists, the map of kept blocks (empty unless asked for), then the statistics if asked for."""
    options = SearchOptions(
        block_size, min_blocks, max_blocks, selection, query_aware, pattern_queries, index_queries, share_kv_heads, keep_all,
        search_pattern, scale, softcap, window, with_stats, with_keep,
    )  # fmt: skip
    result = run_search(query, key, gamma, tau, offset, attention_mask, options)
    keep = query.new_empty(0, dtype=torch.bool) if result.keep is None else result.keep
    return [*result.lists, keep, *(result.stats or ())]


@search_operator.register_fake
def _(
    query: Tensor,
    key: Tensor,
    gamma: Tensor,
    tau: Tensor,
    offset: Tensor | None,
    attention_mask: Tensor | None,
    block_size: int,
    *options: int | float | bool | str | None,
) -> list[Tensor]:
    with_stats, with_keep = options[-2:]
    heads = query.shape[:2]
    rows = (*heads, num_blocks(query.shape[2], block_size))
    blocks = (*rows, num_blocks(key.shape[2], block_size))
    shapes: list[tuple[tuple[int, ...], torch.dtype]] = [(rows, torch.int32), (blocks, torch.int32)] * 2
    shapes.append((blocks if with_keep else (0,), torch.bool))
    if with_stats:
        dtypes = (torch.bool, torch.float32, torch.float32, torch.int64, torch.int64, torch.float32)
        shapes += [(tuple(heads), dtype) for dtype in dtypes]
    return [query.new_empty(shape, dtype=dtype) for shape, dtype in shapes]
